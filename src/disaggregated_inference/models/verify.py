"""Describes a model without loading it (`disagg models inspect`), and compares two (`disagg models verify`)."""

import json
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from disaggregated_inference.errors import ModelNotFound, ModelUnsupported
from disaggregated_inference.kv import Fingerprint
from disaggregated_inference.models import ollama_store
from disaggregated_inference.models.compare import compare_bytes, compare_values
from disaggregated_inference.models.convert import OnStep
from disaggregated_inference.models.rope import llamacpp_rope
from disaggregated_inference.models.store import ModelFiles, ModelStore
from disaggregated_inference.timeouts import CommandTimeouts

_MAX_BYTES = 1 << 24
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.-]+):\d{1,5}(/.*)?")
_WITH_EXPERTS = frozenset({"qwen3_moe", "gpt_oss"})
_MOVES = "KV may move between them"
_LLAMACPP_ONLY = "llama.cpp rounds its YaRN range, so a llama.cpp node exchanges KV with other llama.cpp nodes only"


class ModelDescription(NamedTuple):
    """A model at one place; `model` only if its files are on this machine."""

    place: str
    fingerprint: Fingerprint
    model: ModelFiles | None = None
    in_llamacpp: Fingerprint | None = None  # of a llama.cpp node with these files, if it differs


class ModelComparison(NamedTuple):
    summary: str
    differences: list[str]


def describe_model(model: ModelFiles, context: int | None = None) -> dict[str, Any]:
    """`context`: the number of tokens for which memory is computed; by default the context window."""
    spec, tokens = model.spec, context or model.spec.context_window
    return {
        "name": model.name,
        "path": str(model.path),
        "kind": model.kind,
        "architecture": spec.architecture,
        "layers": len(spec.layout.layers),
        "context_window": spec.context_window,
        "vocabulary": spec.vocabulary,
        "eos_tokens": list(spec.eos_tokens),
        "weights_bytes": model.size_bytes,
        "kv_bytes_per_token": spec.kv_token_bytes("bfloat16"),
        "context": tokens,
        "kv_bytes": spec.kv_bytes(tokens, "bfloat16"),
        "memory_bytes": model.size_bytes + spec.kv_bytes(tokens, "bfloat16"),
        "fingerprint": msgspec.to_builtins(model.fingerprint),
        "fingerprint_in_llamacpp": msgspec.to_builtins(_in_llamacpp(model)),
    }


def _in_llamacpp(model: ModelFiles) -> Fingerprint | None:
    rope = llamacpp_rope(model.config, model.spec.layout.head_dim)
    if rope == model.spec.rope:
        return None
    return msgspec.structs.replace(model.fingerprint, rope_frequencies=rope.frequencies)


def describe_models(
    places: Sequence[str],
    store: ModelStore,
    token: str = "",
    progress: OnStep | None = None,
    tls: ssl.SSLContext | None = None,
    timeouts: CommandTimeouts = CommandTimeouts(),
) -> list[ModelDescription]:
    """Each place is a model name, a node's URL, or a file from `inspect --json`. Models are resolved last, because the
    embedded one may have to be downloaded. `tls`: for nodes with an identity."""
    read = {place: _read(place, store, token, tls, timeouts) for place in places}
    return [read[place] or _of_files(place, store, progress) for place in places]


def _read(
    place: str, store: ModelStore, token: str, tls: ssl.SSLContext | None, timeouts: CommandTimeouts
) -> ModelDescription | None:
    if url := _url(place, store):
        return _decode(_from_node(url, token, tls, timeouts), url)
    if place.endswith(".json") and (path := Path(place).expanduser()).is_file():
        return _decode(path.read_bytes(), place)
    return None


def _url(place: str, store: ModelStore) -> str:
    """A URL, or `host:port` unless a model has that name; else empty."""
    if place.startswith(("http://", "https://")):
        return place
    known = place in store.names or Path(place).exists() or ollama_store.find(place)
    return f"http://{place}" if _ADDRESS.fullmatch(place) and not known else ""


def _of_files(place: str, store: ModelStore, progress: OnStep | None) -> ModelDescription:
    model = store.resolve(place, progress) if progress else store.resolve(place)
    return ModelDescription(place, model.fingerprint, model, _in_llamacpp(model))


def _from_node(url: str, token: str, tls: ssl.SSLContext | None, timeouts: CommandTimeouts) -> bytes:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url.rstrip("/") + "/model", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=timeouts.status_s, context=tls) as response:
            content: bytes = response.read(_MAX_BYTES)
            return content
    except urllib.error.HTTPError as error:
        problem = (
            "refuses the token; compare DISAGG_TOKEN with the node's" if token else "needs a token; set DISAGG_TOKEN"
        )
        hints = {401: f": it {problem}", 404: ": is this the address of a node?"}
        raise ModelNotFound(f"{url} answers with HTTP {error.code}{hints.get(error.code, '')}") from error
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        hint = "start the node, or check address and port"
        raise ModelNotFound(f"{url} does not answer: {reason}; {hint}") from error


def _decode(content: bytes, place: str) -> ModelDescription:
    try:
        fields = json.loads(content)
        if fields["fingerprint"] is None:
            raise ModelNotFound(f"{place} has no fingerprint: a model served by Ollama cannot be compared")
        in_llamacpp = msgspec.convert(fields.get("fingerprint_in_llamacpp"), Fingerprint | None)
        return ModelDescription(place, msgspec.convert(fields["fingerprint"], Fingerprint), in_llamacpp=in_llamacpp)
    except (ValueError, KeyError, TypeError, AttributeError, msgspec.ValidationError) as error:
        raise ModelNotFound(f"{place} does not describe a model: {error}") from error


def compare_models(here: ModelDescription, there: ModelDescription, full: bool = False) -> ModelComparison:
    """Whether KV may move between them, and what was compared."""
    for each in (here, there) if full else ():
        if not each.model:
            raise ModelUnsupported(f"--full reads the files of both models; those of {each.place} are not here")
    differences = here.fingerprint.differences(there.fingerprint)
    if differences and not _same_in_llamacpp(here, there):
        return ModelComparison("not the same model", differences)
    if differences or _needs_llamacpp(here, there):
        return _compared(here, there, full, _LLAMACPP_ONLY)
    return _compared(here, there, full, "")


def _same_in_llamacpp(here: ModelDescription, there: ModelDescription) -> bool:
    pairs = ((here.in_llamacpp, there.fingerprint), (there.in_llamacpp, here.fingerprint))
    return any(mine is not None and not mine.differences(theirs) for mine, theirs in pairs)


def _needs_llamacpp(here: ModelDescription, there: ModelDescription) -> bool:
    """One is for llama.cpp, which applies another RoPE than the other's engines."""
    kinds = {each.fingerprint.weights.format.startswith("gguf") for each in (here, there)}
    return len(kinds) == 2 and bool(here.in_llamacpp or there.in_llamacpp)


def _compared(here: ModelDescription, there: ModelDescription, full: bool, only: str) -> ModelComparison:
    mine, theirs = here.fingerprint.weights, there.fingerprint.weights
    alike = mine.format == theirs.format and (full or mine.sample == theirs.sample)
    if full:
        compared, how = _bytes(here, there)
    elif alike:
        compared, how = [], "the norms and a sample of every tensor are equal"
        how += "; --full compares every byte" if here.model and there.model else ""
    else:
        compared, how = _values(here, there)
    if compared:
        return ModelComparison("not the same model", compared)
    if alike:
        return ModelComparison(f"the same model: {how}" + (f"; {only}" if only else ""), [])
    formats = f"{mine.format} and {theirs.format}" if mine.format != theirs.format else f"both {mine.format}"
    return ModelComparison(f"the same model, stored differently ({formats}): {only or _MOVES}; {how}", [])


def _values(here: ModelDescription, there: ModelDescription) -> tuple[list[str], str]:
    """Rows of the files if both are here; else the values in the fingerprints, which did not differ."""
    if here.model and there.model:
        tensors, differences = compare_values(here.model, there.model)
    else:
        mine, theirs = (
            {sample.tensor for sample in side.fingerprint.weights.values if sample.read} for side in (here, there)
        )
        tensors, differences = mine & theirs, []
    if not tensors:
        return [], "only the norms could be compared"
    how = f"the norms are equal, and samples of {len(tensors)} other tensors except for rounding"
    return differences, how + _left_out(here.fingerprint.architecture, tensors)


def _left_out(architecture: str, tensors: set[str]) -> str:
    """A note if experts, most of such a model, were not compared."""
    compared = architecture not in _WITH_EXPERTS or any(".experts." in name for name in tensors)
    return "" if compared else "; experts were not compared"


def _bytes(here: ModelDescription, there: ModelDescription) -> tuple[list[str], str]:
    assert here.model
    assert there.model
    formats = [each.fingerprint.weights.format for each in (here, there)]
    if formats[0] != formats[1]:
        reason = f"--full compares bytes, and these are stored differently ({' and '.join(formats)})"
        raise ModelUnsupported(f"{reason}: without --full a sample of values is compared")
    return compare_bytes(here.model, there.model), "every byte of the tensors is equal"
