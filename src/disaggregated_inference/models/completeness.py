"""Checks that a model's files are complete, before an engine spends an hour loading them."""

import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from disaggregated_inference.errors import ModelDamaged
from disaggregated_inference.models.tokenizer import read_json

_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.safetensors$")
_MAX_LISTED = 4

_ATTENTION = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output")
_DENSE = ("ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
_EXPERTS = ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
_HEAD_NORMS = ("attn_q_norm", "attn_k_norm")
_IN_A_GGUF = {
    "llama": (*_ATTENTION, *_DENSE),
    "qwen3": (*_ATTENTION, *_HEAD_NORMS, *_DENSE),
    "qwen3_moe": (*_ATTENTION, *_HEAD_NORMS, "ffn_norm", *_EXPERTS),
    "gpt_oss": (*_ATTENTION, "attn_sinks", "post_attention_norm", *_EXPERTS),
}
_EVERYWHERE = ("input_layernorm", "post_attention_layernorm", *(f"self_attn.{each}_proj" for each in "qkvo"))
_IN_A_FOLDER = {
    "llama": (*_EVERYWHERE, *(f"mlp.{each}_proj" for each in ("gate", "up", "down"))),
    "qwen3": (*_EVERYWHERE, *(f"mlp.{each}_proj" for each in ("gate", "up", "down"))),
    "qwen3_moe": (*_EVERYWHERE, "mlp"),  # names of experts differ between converters
    "gpt_oss": (*_EVERYWHERE, "mlp"),
}


def require_complete_gguf(path: Path, architecture: str, layers: int, names: Collection[str]) -> None:
    needed = ["token_embd", "output_norm"]
    needed += [f"blk.{layer}.{part}" for layer in range(layers) for part in _IN_A_GGUF[architecture]]
    _require(path, (f"{name}.weight" for name in needed), names)
    found = {int(name.split(".")[1]) for name in names if re.match(r"blk\.\d+\.", name)}
    if beyond := sorted(layer for layer in found if layer >= layers):
        raise ModelDamaged(f"{path}: its metadata has {layers} layers, but it has tensors of layer {beyond[0]}")


def require_complete_folder(folder: Path, architecture: str, layers: int, names: Collection[str]) -> None:
    """Names are compared without their last part, which differs for quantized weights."""
    for index in _indexes(folder):
        _require(index, _weight_map(index), names)
    needed = ["embed_tokens", "norm"]
    needed += [f"layers.{layer}.{part}" for layer in range(layers) for part in _IN_A_FOLDER[architecture]]
    _require(folder, needed, {stem for name in names for stem in _stems(name.removeprefix("model."))})


def find_shards(folder: Path) -> list[Path]:
    """All shards, or an error that names the missing ones."""
    found = sorted(folder.glob("*.safetensors"))
    wanted = {name for file in found for name in _siblings(file.name)}
    for index in _indexes(folder):
        wanted |= set(_weight_map(index).values())
    _require(folder, sorted(wanted), {file.name for file in found if file.is_file()})
    return found


def _siblings(name: str) -> Iterator[str]:
    if part := _SHARD.search(name):
        for number in range(1, int(part[2]) + 1):
            yield f"{name[: part.start()]}-{number:05}-of-{part[2]}.safetensors"


def _indexes(folder: Path) -> list[Path]:
    """Ignores an index whose shards were merged into one file: engines load that file."""
    found = sorted(folder.glob("*.safetensors.index.json"))
    return [index for index in found if not index.with_name(index.name.removesuffix(".index.json")).exists()]


def _weight_map(index: Path) -> dict[str, str]:
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise ModelDamaged(f"{index} has no weight_map that names a file for each tensor; download the model again")
    return found


def _stems(name: str) -> Iterator[str]:
    """`a.b.c` -> `a.b`, `a`."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _require(place: Path, needed: Iterable[str], there: Collection[str]) -> None:
    if missing := [name for name in needed if name not in there]:
        more = f" and {len(missing) - _MAX_LISTED} more" if len(missing) > _MAX_LISTED else ""
        raise ModelDamaged(f"{place}: {', '.join(missing[:_MAX_LISTED])}{more} missing; download the model again")
