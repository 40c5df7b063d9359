"""Compares the weights of two models on this machine, in any formats.

Compares more than fingerprints do: rows of every tensor that can be read on both sides, or every byte.
"""

import hashlib
import math
from typing import NamedTuple

from disaggregated_inference.kv import ComparedValues, describe_difference, without_layer_number
from disaggregated_inference.models.safetensors import StoredTensor
from disaggregated_inference.models.store import ModelFiles
from disaggregated_inference.models.weights_hash import FIRST_ROW, ROUNDING, comparable, layer_of, rows

_ROWS = 16  # per tensor


class Comparison(NamedTuple):
    """The tensors that could be compared, and their differences."""

    tensors: set[str]
    differences: list[str]


def compare_values(mine: ModelFiles, theirs: ModelFiles) -> Comparison:
    here, there = (_readable(model) for model in (mine, theirs))
    both = sorted(here.keys() & there.keys())
    shapes = [line for name in both if (line := _shapes(here[name], there[name]))]
    return Comparison(set(both), _some(shapes or _differences([(here[name], there[name]) for name in both])))


def compare_bytes(mine: ModelFiles, theirs: ModelFiles) -> list[str]:
    """Every byte of every tensor."""
    here, there = (_hashes(model) for model in (mine, theirs))
    names = sorted(here.keys() | there.keys())
    return _some([f"weights: {name} differs" for name in names if here.get(name) != there.get(name)])


def _readable(model: ModelFiles) -> dict[str, StoredTensor]:
    return {each.name: each for each in comparable(model.tensors()) if each.dtype in ROUNDING}


def _shapes(mine: StoredTensor, theirs: StoredTensor) -> str:
    """A difference in shape; a vocabulary may be padded."""
    same = mine.shape == theirs.shape or (layer_of(mine) < 0 and mine.shape[1:] == theirs.shape[1:])
    return "" if same else f"weights: {mine.name} is {mine.shape} here, {theirs.shape} there"


def _differences(tensors: list[tuple[StoredTensor, StoredTensor]]) -> list[str]:
    """Tensor by tensor; Q and K, with a single row each, together over all layers."""
    groups: dict[str, list[ComparedValues]] = {}
    for mine, theirs in tensors:
        group = without_layer_number(mine.name) if mine.name.endswith(FIRST_ROW) else mine.name
        groups.setdefault(group, []).append(_pair(mine, theirs))
    return [line for group, pairs in groups.items() if (line := describe_difference(group, pairs))]


def _pair(mine: StoredTensor, theirs: StoredTensor) -> ComparedValues:
    ours, others = rows(mine, _ROWS), rows(theirs, _ROWS)
    count = min(len(ours), len(others))
    return ComparedValues(ours[:count], others[:count], math.hypot(ROUNDING[mine.dtype], ROUNDING[theirs.dtype]))


def _hashes(model: ModelFiles) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for tensor in model.tensors():
        head = f"{tensor.name} {tensor.dtype} {tensor.shape} ".encode()
        hashed = hashlib.sha256(found.get(tensor.name, b"") + head)  # two tensors of a GGUF may have the same name here
        hashed.update(tensor.data)
        found[tensor.name] = hashed.digest()
    return found


def _some(lines: list[str]) -> list[str]:
    return lines[:4] + ([f"weights: {len(lines) - 4} more tensors differ"] if len(lines) > 4 else [])
