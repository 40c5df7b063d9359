"""Tags of simulated rows: a hash of all tokens up to the row, its position, its layer, K or V.

A tag is sixteen numbers from 0 to 127 at the start of the row; the rest is zeros. Such small numbers are exact in every
KV dtype. One of them is always 127, so the int8 codec's scale is 1 and keeps them exact too. So the next token depends
only on the transferred row, and a misplaced row is detected.
"""

import hashlib
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disaggregated_inference.kv import Array, KVDType, as_dtype

Hashes = NDArray[np.uint64]

TAG = 16  # elements of a tag
MAX_LAYERS = 128
MAX_TOKENS = 1 << 21
_HASH, _POSITION, _LAYER, _KIND = slice(1, 11), slice(11, 14), 14, 15
_DIGIT_BITS = 7
_HASH_SHIFTS = _DIGIT_BITS * np.arange(10, dtype=np.uint64)
_POSITION_SHIFTS = _DIGIT_BITS * np.arange(3, dtype=np.uint64)
_LARGEST = np.uint64(127)

_FACTOR = 0x9E3779B97F4A7C15  # odd, so that it has an inverse
_INVERSE = pow(_FACTOR, -1, 1 << 64)


class HashChain:
    """hash' = hash * factor + value(token), in 64 bits: a chunk takes two products and a running sum."""

    def __init__(self, seed: str, vocabulary: int) -> None:
        self.start = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=8).digest())
        self._values = mix(np.arange(1, vocabulary + 1, dtype=np.uint64))
        self._up = self._down = np.empty(0, np.uint64)

    def extend(self, chain: int, tokens: Items[int]) -> Hashes:
        """The hash after each of `tokens`."""
        count = len(tokens)
        if count > len(self._up):
            self._up, self._down = _powers(_FACTOR, count), _powers(_INVERSE, count)
        sums: Hashes = np.add.accumulate(self._values[np.asarray(tokens, np.int64)] * self._down[:count])
        return self._up[:count] * (sums + np.uint64(chain))

    def step(self, chains: Items[int], tokens: NDArray[np.int64]) -> Hashes:
        """One more token for each chain."""
        return np.array(chains, np.uint64) * np.uint64(_FACTOR) + self._values[tokens]


def _powers(base: int, count: int) -> Hashes:
    powers: Hashes = np.multiply.accumulate(np.full(count, base, np.uint64))
    return powers


def mix(hashes: Hashes) -> Hashes:
    """Mix bits so that each depends on all (the end of splitmix64)."""
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))


class RowTags:
    """Tags in the bits of one dtype."""

    def __init__(self, dtype: KVDType) -> None:
        self._bits: Array = as_dtype(np.arange(128, dtype=np.float32), "float32", dtype)

    def block(self, hashes: Hashes, start: int) -> Array:
        """Tags of the rows from `start` on, [rows, 16]; `label` fills in layer and kind."""
        digits = np.zeros((len(hashes), TAG), np.uint8)
        positions = np.arange(start, start + len(hashes), dtype=np.uint64)
        digits[:, 0] = _LARGEST
        digits[:, _HASH] = hashes[:, None] >> _HASH_SHIFTS & _LARGEST
        digits[:, _POSITION] = positions[:, None] >> _POSITION_SHIFTS & _LARGEST
        return self._bits[digits]

    def label(self, block: Array, layer: int, kind: int) -> Array:
        """The tags for one layer's K (kind 0) or V (kind 1), in place."""
        block[:, _LAYER], block[:, _KIND] = self._bits[layer], self._bits[kind]
        return block

    def read_hash(self, tag: Array) -> int | None:
        """The hash in a row's tag; None if it is not a tag."""
        digits = np.minimum(np.searchsorted(self._bits, tag[_HASH]), 127)
        if not np.array_equal(self._bits[digits], tag[_HASH]):
            return None
        return sum(int(digit) << int(shift) for digit, shift in zip(digits, _HASH_SHIFTS, strict=True)) % (1 << 64)

    def expected_tags(self, rows: Array, start: int) -> Array:
        """The tags that rows with these hashes must have at `start`."""
        expected = self.block(np.zeros(len(rows), np.uint64), start)
        expected[:, _HASH] = rows[:, _HASH]
        return expected


def words(rows: Array) -> NDArray[Any]:
    """Tags as 64-bit words: comparing them is four times as fast."""
    return rows.view(np.uint64)
