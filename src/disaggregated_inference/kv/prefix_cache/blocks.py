"""Parts of the prefix cache: addresses of token runs, blocks of rows, and matches.

A block's address is H(parent's address, its tokens), so an address identifies everything before it too, and two prompts
share exactly their common beginning. Prompts are untrusted: the hash is cryptographic, and a hit still compares tokens.
Each salt has addresses of its own, too.

Sliding layers keep a window instead of a row per token, so their rows are stored as *snapshots*: the windows of all
sliding layers at one position, in the block that holds the token before it.
"""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from disaggregated_inference.kv.dtype import Array, KVDType, storage_dtype
from disaggregated_inference.kv.fingerprint import Fingerprint
from disaggregated_inference.kv.layout import KVLayout, KVSlice
from disaggregated_inference.kv.salt import NO_SALT, Salt

HASH_BYTES = 16
MAX_SNAPSHOTS = 4  # of one insertion, and of one block: each may be larger than the block itself
_WORD = np.dtype("<i8")

Pair = tuple[Array, Array]  # keys, values
Snapshot = tuple[Pair, ...]  # one pair per sliding layer


class BlockAddress(NamedTuple):
    """A run of tokens and everything before it. `tokens` are little-endian words, for hashing and comparing."""

    hash: bytes
    parent: bytes
    start: int
    tokens: bytes

    @property
    def length(self) -> int:
        return len(self.tokens) // _WORD.itemsize

    @property
    def stop(self) -> int:
        return self.start + self.length

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(np.frombuffer(self.tokens, _WORD).tolist())

    def upto(self, stop: int) -> "BlockAddress":
        return address(self.parent, self.start, self.tokens[: (stop - self.start) * _WORD.itemsize])


def address(parent: bytes, start: int, tokens: bytes) -> BlockAddress:
    return BlockAddress(hashlib.blake2b(parent + tokens, digest_size=HASH_BYTES).digest(), parent, start, tokens)


def words(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, _WORD).tobytes()


def chain(root: bytes, tokens: Sequence[int], block_tokens: int, salt: Salt = NO_SALT) -> list[BlockAddress]:
    """The addresses of a sequence's blocks; the last block may be shorter."""
    found: list[BlockAddress] = []
    data, size = words(tokens), block_tokens * _WORD.itemsize
    for number, at in enumerate(range(0, len(data), size)):
        parent = salt.parent(found[-1].hash if found else root, number, block_tokens)
        found.append(address(parent, number * block_tokens, data[at : at + size]))
    return found


def cut(addresses: list[BlockAddress], stop: int) -> list[BlockAddress]:
    """The same sequence, ending at `stop`."""
    return [each if each.stop <= stop else each.upto(stop) for each in addresses if each.start < stop]


def shared_tokens(mine: bytes, theirs: bytes) -> int:
    """The length of the common beginning of two runs."""
    size = min(len(mine), len(theirs))
    if mine[:size] == theirs[:size]:
        return size // _WORD.itemsize
    return int(np.argmax(np.frombuffer(mine[:size], _WORD) != np.frombuffer(theirs[:size], _WORD)))


class BlockShape(msgspec.Struct, frozen=True):
    """The arrays of a block, derived from a model's layout and dtype."""

    dtype: KVDType
    full_layers: int
    windows: tuple[int, ...]  # of the sliding layers
    kv_heads: int
    head_dim: int

    @staticmethod
    def of(layout: KVLayout, dtype: KVDType) -> "BlockShape":
        windows = tuple(plan.window for plan in layout.layers if plan.kind == "sliding")
        return BlockShape(dtype, len(layout.layers) - len(windows), windows, layout.kv_heads, layout.head_dim)

    @property
    def row_bytes(self) -> int:
        """K and V of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * storage_dtype(self.dtype).itemsize

    @property
    def token_bytes(self) -> int:
        return self.full_layers * self.row_bytes

    def snapshot_bytes(self, position: int) -> int:
        return self.row_bytes * sum(min(window, position) for window in self.windows)

    def size_bytes(self, tokens: int, positions: Sequence[int]) -> int:
        return tokens * self.token_bytes + sum(map(self.snapshot_bytes, positions))

    def block_pair(self, tokens: int) -> Pair:
        return self._pair(self.full_layers, tokens, self.kv_heads, self.head_dim)

    def snapshot(self, position: int) -> Snapshot:
        rows = [min(window, position) for window in self.windows]
        return tuple(self._pair(count, self.kv_heads, self.head_dim) for count in rows)

    def _pair(self, *shape: int) -> Pair:
        storage = storage_dtype(self.dtype)
        return np.empty(shape, storage), np.empty(shape, storage)


def root_of(fingerprint: Fingerprint, dtype: KVDType, block_tokens: int) -> bytes:
    """The first parent of a model's addresses: rows of another model or dtype have other addresses."""
    key = msgspec.json.encode(("prefix-1", fingerprint, dtype, block_tokens))
    return hashlib.blake2b(key, digest_size=HASH_BYTES).digest()


@dataclass(eq=False, slots=True, weakref_slot=True)
class Block:
    """K and V of a run of tokens, each [full_layers, tokens, kv_heads, head_dim]. The arrays never change; the tree
    owns the links. `snapshots` is replaced, never modified: other threads read it."""

    address: BlockAddress
    keys: Array
    values: Array
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    parent: "Block | None" = None
    children: dict[bytes, "Block"] = field(default_factory=dict)
    used_at: float = 0.0

    @property
    def positions(self) -> tuple[int, ...]:
        return tuple(self.snapshots)

    @property
    def size_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[Array]:
        """All arrays, in their order on disk."""
        pairs = [(self.keys, self.values), *itertools.chain.from_iterable(self.snapshots.values())]
        return list(itertools.chain.from_iterable(pairs))


def spans(start: int, stop: int, block_tokens: int) -> Iterator[tuple[int, int, int]]:
    """Positions [start, stop) as (block number, first row in it, row after the last)."""
    for number in range(start // block_tokens, -(-stop // block_tokens)):
        first = number * block_tokens
        yield number, max(start - first, 0), min(stop - first, block_tokens)


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix. It holds the arrays themselves, so eviction does not affect it."""

    tokens: int
    layout: KVLayout
    dtype: KVDType
    block_tokens: int
    pairs: tuple[Pair, ...] = ()
    snapshot: Snapshot = ()

    def slices(self, chunk_tokens: int) -> Iterator[KVSlice]:
        """The rows of [0, tokens), group of tokens by group, all layers of each.

        A model with sliding layers has one group: their windows at earlier positions are not known.
        """
        step = self.tokens if self.snapshot else chunk_tokens
        for start in range(0, self.tokens, max(step, 1)):
            yield from self._group(start, min(start + step, self.tokens))

    def _group(self, start: int, stop: int) -> Iterator[KVSlice]:
        rows, windows = itertools.count(), iter(self.snapshot)
        for layer, plan in enumerate(self.layout.layers):
            if plan.kind == "full":
                keys, values = self._rows(next(rows), start, stop)
            else:
                keys, values = (array.copy() for array in next(windows))
            yield KVSlice(layer, stop - len(keys), self.dtype, keys, values)

    def _rows(self, row: int, start: int, stop: int) -> Pair:
        parts = list(spans(start, stop, self.block_tokens))
        keys = np.concatenate([self.pairs[number][0][row, low:high] for number, low, high in parts])
        return keys, np.concatenate([self.pairs[number][1][row, low:high] for number, low, high in parts])


def frozen(array: Array) -> Array:
    """The array, made read-only."""
    array.flags.writeable = False
    return array
