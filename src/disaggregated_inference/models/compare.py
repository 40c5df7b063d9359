"""Whether two models on this machine hold the same weights, whatever they are stored as.

More of them than a fingerprint carries: rows of every tensor that both sides can be read as numbers of, or every byte.
"""

import hashlib
import math
from typing import NamedTuple

from disaggregated_inference.kv.fingerprint import Pair, far_apart, kind_of
from disaggregated_inference.models.identity import FIRST_ROW, ROUNDING, comparable, layer_of, rows
from disaggregated_inference.models.safetensors import StoredTensor
from disaggregated_inference.models.store import ModelFiles

_ROWS = 16  # of each tensor, spread over it


class Compared(NamedTuple):
    """Which tensors could be, and what differs in them."""

    tensors: set[str]
    differences: list[str]


def compare_values(mine: ModelFiles, theirs: ModelFiles) -> Compared:
    here, there = (_readable(model) for model in (mine, theirs))
    both = sorted(here.keys() & there.keys())
    shapes = [line for name in both if (line := _shapes(here[name], there[name]))]
    return Compared(set(both), _some(shapes or _differences([(here[name], there[name]) for name in both])))


def compare_bytes(mine: ModelFiles, theirs: ModelFiles) -> list[str]:
    """Every byte of every tensor."""
    here, there = (_hashes(model) for model in (mine, theirs))
    names = sorted(here.keys() | there.keys())
    return _some([f"weights: {name} differs" for name in names if here.get(name) != there.get(name)])


def _readable(model: ModelFiles) -> dict[str, StoredTensor]:
    return {each.name: each for each in comparable(model.tensors()) if each.dtype in ROUNDING}


def _shapes(mine: StoredTensor, theirs: StoredTensor) -> str:
    """A vocabulary may be padded."""
    same = mine.shape == theirs.shape or (layer_of(mine) < 0 and mine.shape[1:] == theirs.shape[1:])
    return "" if same else f"weights: {mine.name} is {mine.shape} here, {theirs.shape} there"


def _differences(tensors: list[tuple[StoredTensor, StoredTensor]]) -> list[str]:
    """Each tensor for itself; but of Q and K there is a single row, so those of all layers together."""
    groups: dict[str, list[Pair]] = {}
    for mine, theirs in tensors:
        group = kind_of(mine.name) if mine.name.endswith(FIRST_ROW) else mine.name
        groups.setdefault(group, []).append(_pair(mine, theirs))
    return [line for group, pairs in groups.items() if (line := far_apart(group, pairs))]


def _pair(mine: StoredTensor, theirs: StoredTensor) -> Pair:
    ours, others = rows(mine, _ROWS), rows(theirs, _ROWS)
    count = min(len(ours), len(others))
    return Pair(ours[:count], others[:count], math.hypot(ROUNDING[mine.dtype], ROUNDING[theirs.dtype]))


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
