"""What can be said about a model without loading it, and whether two copies are one model."""

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import msgspec

from disaggregated_inference.errors import ModelNotFound
from disaggregated_inference.kv import Fingerprint
from disaggregated_inference.kv.fingerprint import Weights
from disaggregated_inference.models.convert import Progress
from disaggregated_inference.models.store import ModelFiles, ModelStore

_PATIENCE_S = 10.0
_MOST_BYTES = 1 << 24


def about(model: ModelFiles, context: int | None = None) -> dict[str, Any]:
    """`context`: how many tokens the memory is told for; the whole window where nobody says."""
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
    }


def fingerprint_at(place: str, store: ModelStore, token: str = "", progress: Progress | None = None) -> Fingerprint:
    """Of a model here by any of its names, of what a node serves (its URL), or of what `inspect --json` printed."""
    if place.startswith(("http://", "https://")):
        return _fingerprint(_from_node(place, token), place)
    if place.endswith(".json") and (path := Path(place).expanduser()).is_file():
        return _fingerprint(path.read_bytes(), place)
    return (store.resolve(place, progress) if progress else store.resolve(place)).fingerprint


def _from_node(url: str, token: str) -> bytes:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url.rstrip("/") + "/model", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_PATIENCE_S) as response:
            content: bytes = response.read(_MOST_BYTES)
            return content
    except urllib.error.HTTPError as error:
        hint = {401: ": give its --token", 404: ": is it the address of a node?"}.get(error.code, "")
        raise ModelNotFound(f"{url} answers with HTTP {error.code}{hint}") from error
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        hint = "start the node there, or check the address and the port"
        raise ModelNotFound(f"{url} does not answer: {reason}; {hint}") from error


def _fingerprint(content: bytes, place: str) -> Fingerprint:
    try:
        told = json.loads(content)["fingerprint"]
        if told is None:
            raise ModelNotFound(f"{place} tells no fingerprint: what an Ollama holds cannot be compared")
        return msgspec.convert(told, Fingerprint)
    except (ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
        raise ModelNotFound(f"{place} has no fingerprint of a model: {error}") from error


def sameness(mine: Weights, theirs: Weights) -> str:
    """How much is known, where nothing differs."""
    if mine.format == theirs.format:
        return "the same model: its norms and a sample of every tensor are equal"
    return f"the same model, stored differently ({mine.format} and {theirs.format}): a cache may move between them"
