"""What a simulated row says of itself: a hash of all tokens up to it, its position, its layer, whether it is K or V.

Sixteen numbers from 0 to 127 at the row's beginning; the rest of it is zeros. Numbers so small are exact in every KV
dtype, and because one of them is always 127, the int8 codec's scale is 1 and keeps them exact too. So the next token
can depend on nothing but the row that was handed over, and a row at a wrong place shows.
"""

import hashlib
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disaggregated_inference.kv import KVDType, as_dtype
from disaggregated_inference.kv.dtype import Array

Hashes = NDArray[np.uint64]

MARK = 16  # elements
MOST_LAYERS = 128
MOST_TOKENS = 1 << 21
_HASH, _POSITION, _LAYER, _KIND = slice(1, 11), slice(11, 14), 14, 15
_DIGIT_BITS = 7
_HASH_SHIFTS = _DIGIT_BITS * np.arange(10, dtype=np.uint64)
_POSITION_SHIFTS = _DIGIT_BITS * np.arange(3, dtype=np.uint64)
_LARGEST = np.uint64(127)

_FACTOR = 0x9E3779B97F4A7C15  # odd, so that it has an inverse
_INVERSE = pow(_FACTOR, -1, 1 << 64)


class Chain:
    """hash' = hash * factor + value(token), in 64 bits: a whole chunk is two products and a running sum."""

    def __init__(self, seed: str, vocabulary: int) -> None:
        self.start = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=8).digest())
        self._values = mixed(np.arange(1, vocabulary + 1, dtype=np.uint64))
        self._up = self._down = np.empty(0, np.uint64)

    def extend(self, chain: int, tokens: Items[int]) -> Hashes:
        """The hash after each of `tokens`."""
        count = len(tokens)
        if count > len(self._up):
            self._up, self._down = _powers(_FACTOR, count), _powers(_INVERSE, count)
        sums: Hashes = np.add.accumulate(self._values[np.asarray(tokens, np.int64)] * self._down[:count])
        return self._up[:count] * (sums + np.uint64(chain))

    def step(self, chains: Items[int], tokens: NDArray[np.int64]) -> Hashes:
        """One token more for each of several."""
        return np.array(chains, np.uint64) * np.uint64(_FACTOR) + self._values[tokens]


def _powers(base: int, count: int) -> Hashes:
    powers: Hashes = np.multiply.accumulate(np.full(count, base, np.uint64))
    return powers


def mixed(hashes: Hashes) -> Hashes:
    """Every bit depends on every bit (the end of splitmix64)."""
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))


class Marks:
    """The sixteen numbers in one dtype's own bits."""

    def __init__(self, dtype: KVDType) -> None:
        self._bits: Array = as_dtype(np.arange(128, dtype=np.float32), "float32", dtype)

    def block(self, hashes: Hashes, start: int) -> Array:
        """Marks of the rows from `start` on, [rows, 16]; without layer and kind, which `label` fills in."""
        digits = np.zeros((len(hashes), MARK), np.uint8)
        positions = np.arange(start, start + len(hashes), dtype=np.uint64)
        digits[:, 0] = _LARGEST
        digits[:, _HASH] = hashes[:, None] >> _HASH_SHIFTS & _LARGEST
        digits[:, _POSITION] = positions[:, None] >> _POSITION_SHIFTS & _LARGEST
        return self._bits[digits]

    def label(self, block: Array, layer: int, kind: int) -> Array:
        """The same marks for one layer's K (kind 0) or V (kind 1), in place."""
        block[:, _LAYER], block[:, _KIND] = self._bits[layer], self._bits[kind]
        return block

    def hash_of(self, mark: Array) -> int | None:
        """What a row's mark says; None for numbers that no mark has."""
        digits = np.minimum(np.searchsorted(self._bits, mark[_HASH]), 127)
        if not np.array_equal(self._bits[digits], mark[_HASH]):
            return None
        return sum(int(digit) << int(shift) for digit, shift in zip(digits, _HASH_SHIFTS, strict=True)) % (1 << 64)

    def as_read(self, rows: Array, start: int) -> Array:
        """The block that rows with these hashes would have if they belonged at `start`: compare, and you know."""
        expected = self.block(np.zeros(len(rows), np.uint64), start)
        expected[:, _HASH] = rows[:, _HASH]
        return expected


def words(rows: Array) -> NDArray[Any]:
    """Marks as a few large words: compared four times as fast."""
    return rows.view(np.uint64)
