"""Whether two models on this machine hold the same weights, whatever they are stored as.

Two fine-tunes can share every norm. Values can be compared where both sides can be read as numbers: not bit by bit,
since one of them may be rounded to four bits, but as far as that rounding explains. Rows of Q and K are left out: a
GGUF of a llama keeps them in another order.
"""

import hashlib
import re
from typing import NamedTuple

import numpy as np

from disaggregated_inference.models.gguf import ENCODINGS, Floats
from disaggregated_inference.models.safetensors import StoredTensor
from disaggregated_inference.models.store import ModelFiles

_COMPARED = re.compile(
    r"model\.embed_tokens\.weight|lm_head\.weight|.*\.(self_attn\.[vo]_proj|mlp\.(gate|up|down)_proj)\.weight"
)
_ROWS = 16  # of each tensor, spread over it
_BY_NAME = {encoding.name: encoding for encoding in ENCODINGS.values()}

# |mine - theirs| / |mine| that rounding to each explains, and some more: half of it is usual for bell-shaped weights.
_ROUNDING = {
    **dict.fromkeys(("F32", "F16", "BF16"), 0.01),
    **dict.fromkeys(("Q4_0", "Q4_1", "Q4_K"), 0.2),
    **dict.fromkeys(("Q5_0", "Q5_1", "Q5_K"), 0.1),
    "Q6_K": 0.06,
    "Q8_0": 0.02,
}


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
    return {each.name: each for each in model.tensors() if each.dtype in _ROUNDING and _COMPARED.fullmatch(each.name)}


def _difference(mine: StoredTensor, theirs: StoredTensor) -> str:
    if mine.shape != theirs.shape:
        return f"weights: {mine.name} is {mine.shape} here, {theirs.shape} there"
    ours, others = _rows(mine), _rows(theirs)
    limit = max(_ROUNDING[mine.dtype], _ROUNDING[theirs.dtype])
    far = float(np.linalg.norm(ours - others) / (np.linalg.norm(ours) or 1.0))
    if far <= limit:
        return ""
    rounding = f"{mine.dtype} and {theirs.dtype} explain {limit}"
    return f"weights: {mine.name} differs by {far:.2g} of its size, where {rounding}"


def _rows(tensor: StoredTensor) -> Floats:
    encoding, width = _BY_NAME[tensor.dtype], tensor.shape[-1]
    raw = np.frombuffer(tensor.data, np.uint8).reshape(-1, width // encoding.block * encoding.block_bytes)
    values: Floats = encoding.decode(raw[:: max(1, len(raw) // _ROWS)][:_ROWS].ravel())
    return values.reshape(-1)


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
