"""The canary: before a decode node trusts a prefill node, it asks for a short prompt's cache and computes it again.

Fingerprints say that both hold the same model; the canary says that both compute the same thing with it. Rows are
compared by their relative distance, the median over the prompt's tokens: quantized weights move rows by a few
hundredths (those of small models, to four bits, by up to 0.7, and logits by up to 0.24), and a router may send a token
elsewhere, while a wrong rotation, a swapped head or other weights move all of them by about one.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from disaggregated_inference.errors import PeerRefused
from disaggregated_inference.kv import KVDType, KVSlice, as_dtype
from disaggregated_inference.kv.dtype import Array

TOKENS = 48
LIMIT = 0.3
_COARSE_LIMIT = 0.8  # for keys and values
_COARSE = 0.1  # a rounding of weights: that of five bits and less, and of those that nobody knows


def canary_tokens(vocabulary: int) -> list[int]:
    """The same on every node that has the same vocabulary."""
    return [(7919 * (at + 1)) % vocabulary for at in range(TOKENS)]


class Reading(NamedTuple):
    """What one side makes of the canary prompt."""

    slices: list[KVSlice]
    logits: NDArray[np.float32]  # after the prompt, and after one more token


def require_same(ours: Reading, theirs: Reading, rounding: float = 0.0) -> float:
    """The largest distance anywhere, or `PeerRefused` with the first place where it is too large. `rounding` is that of
    the weights (`Weights.rounding`), of the side where they are coarser."""
    rows = _worst(_of_rows(ours, theirs), _COARSE_LIMIT if rounding >= _COARSE else LIMIT)
    return max(rows, _worst(_of_logits(ours, theirs), LIMIT))


def _worst(places: Iterator[tuple[str, float]], limit: float) -> float:
    worst = 0.0
    for where, far in places:
        if not far <= limit:  # also when it is no number at all
            raise PeerRefused(
                f"the prefill node computes something else than this node: on the canary prompt, {where} differ by"
                f" {far:.3g} of their size (limit {limit}). Do both hold the same model files?"
            )
        worst = max(worst, far)
    return worst


def _of_rows(ours: Reading, theirs: Reading) -> Iterator[tuple[str, float]]:
    for mine, other in zip(ours.slices, theirs.slices, strict=True):
        for name in ("keys", "values"):
            pair = (_rows(getattr(piece, name), piece.dtype) for piece in (mine, other))
            yield f"the {name} of layer {mine.layer}", distance(*pair)


def _of_logits(ours: Reading, theirs: Reading) -> Iterator[tuple[str, float]]:
    for row, when in enumerate(("after the prompt", "one token later")):
        yield f"the logits {when}", distance(ours.logits[row : row + 1], theirs.logits[row : row + 1])


def distance(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> float:
    """|ours - theirs| / |ours| for each token's row, the median of it."""
    size = np.linalg.norm(ours, axis=-1)
    return float(np.median(np.linalg.norm(ours - theirs, axis=-1) / np.where(size == 0, 1, size)))


def _rows(array: Array, dtype: KVDType) -> NDArray[np.float32]:
    rows: NDArray[np.float32] = as_dtype(array, dtype, "float32").reshape(len(array), -1)
    return rows
