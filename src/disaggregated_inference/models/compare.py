"""Whether two models on this machine hold the same weights, whatever they are stored as.

More of them than a fingerprint carries: rows of every tensor that both sides can be read as numbers of, or every byte.
"""

import hashlib
import re
from typing import NamedTuple

import numpy as np

from disaggregated_inference.models.identity import ROUNDING, rows
from disaggregated_inference.models.safetensors import StoredTensor
from disaggregated_inference.models.store import ModelFiles

_COMPARED = re.compile(
    r"model\.embed_tokens\.weight|lm_head\.weight|.*\.(self_attn\.[vo]_proj|mlp\.(gate|up|down)_proj)\.weight"
)
_ROWS = 16  # of each tensor, spread over it


class Compared(NamedTuple):
    """How many tensors could be, and what differs in them."""

    tensors: int
    differences: list[str]


def compare_values(mine: ModelFiles, theirs: ModelFiles) -> Compared:
    here, there = (_readable(model) for model in (mine, theirs))
    both = sorted(here.keys() & there.keys())
    return Compared(len(both), _some([line for name in both if (line := _difference(here[name], there[name]))]))


def compare_bytes(mine: ModelFiles, theirs: ModelFiles) -> list[str]:
    """Every byte of every tensor."""
    here, there = (_hashes(model) for model in (mine, theirs))
    names = sorted(here.keys() | there.keys())
    return _some([f"weights: {name} differs" for name in names if here.get(name) != there.get(name)])


def _readable(model: ModelFiles) -> dict[str, StoredTensor]:
    return {each.name: each for each in model.tensors() if each.dtype in ROUNDING and _COMPARED.fullmatch(each.name)}


def _difference(mine: StoredTensor, theirs: StoredTensor) -> str:
    if mine.shape != theirs.shape:
        return f"weights: {mine.name} is {mine.shape} here, {theirs.shape} there"
    ours, others = rows(mine, _ROWS), rows(theirs, _ROWS)
    limit = max(ROUNDING[mine.dtype], ROUNDING[theirs.dtype])
    far = float(np.linalg.norm(ours - others) / (np.linalg.norm(ours) or 1.0))
    if far <= limit:
        return ""
    rounding = f"{mine.dtype} and {theirs.dtype} explain {limit}"
    return f"weights: {mine.name} differs by {far:.2g} of its size, where {rounding}"


def _hashes(model: ModelFiles) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for tensor in model.tensors():
        head = f"{tensor.name} {tensor.dtype} {tensor.shape} ".encode()
        hashed = hashlib.sha256(found.get(tensor.name, b"") + head)  # two tensors of a GGUF may have one name here
        hashed.update(tensor.data)
        found[tensor.name] = hashed.digest()
    return found


def _some(lines: list[str]) -> list[str]:
    return lines[:4] + ([f"weights: {len(lines) - 4} more tensors differ"] if len(lines) > 4 else [])
