"""The prefix cache: KV of finished requests in host memory, for requests that start with the same tokens.

`match` returns the longest cached prefix; `insert` takes the rows that are missing. Memory is limited by bytes and by
age; a disk tier is optional. One lock guards lookups and links; rows are copied outside it.
"""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from disaggregated_inference.kv.dtype import KVDType
from disaggregated_inference.kv.fingerprint import Fingerprint
from disaggregated_inference.kv.prefix_cache.block_file import Label
from disaggregated_inference.kv.prefix_cache.blocks import (
    MAX_SNAPSHOTS,
    Block,
    BlockAddress,
    BlockShape,
    Match,
    Pair,
    Snapshot,
    chain,
    cut,
    root_of,
)
from disaggregated_inference.kv.prefix_cache.disk import DiskTier
from disaggregated_inference.kv.prefix_cache.insertion import Insertion, Tail
from disaggregated_inference.kv.prefix_cache.tree import BlockTree, Hold, TreePath, rows_reached, snapshot_reached
from disaggregated_inference.kv.salt import NO_SALT, Salt


class PrefixCacheStats(msgspec.Struct, frozen=True):
    """The cache's content now, and its counters since the start."""

    size_bytes: int
    limit_bytes: int
    blocks: int
    hits: int
    misses: int
    hit_tokens: int
    evicted_blocks: int
    disk_bytes: int = 0
    disk_limit_bytes: int = 0
    disk_blocks: int = 0
    disk_hits: int = 0  # blocks read back
    disk_damaged: int = 0  # damaged files that were removed
    disk_dropped: int = 0  # blocks that were evicted before they were written, or found no space


class PrefixCache:
    """Any thread may call. `limit_bytes` 0 turns it off. A model with only sliding layers turns it off too: no rows
    could be shared between positions."""

    def __init__(
        self,
        fingerprint: Fingerprint,
        dtype: KVDType,
        limit_bytes: int,
        block_tokens: int = 64,
        max_age_s: float = 3600.0,
        disk: DiskTier | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.layout, self.dtype, self.block_tokens = fingerprint.layout, dtype, block_tokens
        self._shape = BlockShape.of(fingerprint.layout, dtype)
        self._root = root_of(fingerprint, dtype, block_tokens)
        self._tree = BlockTree(self._root, limit_bytes if self._shape.full_layers else 0)
        self._reach = snapshot_reached if self._shape.windows else rows_reached
        self._max_age_s, self.disk, self._clock = max_age_s, disk, clock
        self._hits = self._misses = self._hit_tokens = 0
        self._lock = threading.Lock()

    @property
    def limit_bytes(self) -> int:
        return self._tree.limit_bytes

    def match(self, tokens: Sequence[int], most: int | None = None, salt: Salt = NO_SALT) -> Match:
        """The longest cached prefix of `tokens`, at most `most` tokens, from which an engine can continue."""
        addresses = self._addresses(tokens if most is None else tokens[: max(most, 0)], salt)
        if not addresses:
            return self._match(TreePath([], 0))
        if self.disk:
            self._bring_back(addresses, self.disk)
        with self._lock:
            path = self._path(addresses)
            self._count(path.tokens)
            found = self._match(path)
        if self.disk:
            self.disk.used(block.address.hash for block in reversed(path.blocks))
        return found

    def recall(self, tokens: Sequence[int], salt: Salt = NO_SALT) -> None:
        """Load blocks from disk ahead of `match`, whose thread must not wait for files."""
        if self.disk and (addresses := self._addresses(tokens, salt)):
            self._bring_back(addresses, self.disk)

    def insert(self, tokens: Sequence[int], salt: Salt = NO_SALT) -> Insertion | None:
        """An insertion for the rows of `tokens` that are missing; None if there are none, or no memory for them."""
        addresses = self._addresses(tokens, salt)
        if not addresses:
            return None
        with self._lock:
            reached = self._path(addresses)
            rows = self._tree.path(addresses, rows_reached)
            self._tree.touch(rows.blocks, self._clock())
            stop = self._stop_that_fits(rows, addresses[-1].stop)
            if stop <= reached.tokens:
                return None
            hold = self._tree.hold(self._size_bytes(rows, stop), self._kept(rows, stop))
            tails = [Tail(reached.tokens, *pair) for pair in _snapshot(reached)]
        return self._insertion(cut(addresses, stop), rows, tails, hold) if hold else None

    def stats(self) -> PrefixCacheStats:
        with self._lock:
            memory = PrefixCacheStats(
                size_bytes=self._tree.size_bytes,
                limit_bytes=self._tree.limit_bytes,
                blocks=len(self._tree.blocks),
                hits=self._hits,
                misses=self._misses,
                hit_tokens=self._hit_tokens,
                evicted_blocks=self._tree.evicted,
            )
        if not (disk := self.disk):
            return memory
        return msgspec.structs.replace(
            memory,
            disk_bytes=disk.size_bytes,
            disk_limit_bytes=disk.limit_bytes,
            disk_blocks=disk.blocks,
            disk_hits=disk.hits,
            disk_damaged=disk.damaged,
            disk_dropped=disk.dropped,
        )

    def close(self) -> None:
        """Stop the disk tier's writer."""
        if self.disk:
            self.disk.close()

    def _addresses(self, tokens: Sequence[int], salt: Salt) -> list[BlockAddress]:
        return chain(self._root, tokens, self.block_tokens, salt) if self.limit_bytes else []

    def _path(self, addresses: list[BlockAddress]) -> TreePath:
        now = self._clock()
        self._tree.evict_unused_since(now - self._max_age_s)
        path = self._tree.path(addresses, self._reach)
        self._tree.touch(path.blocks, now)
        return path

    def _count(self, tokens: int) -> None:
        self._hits += tokens > 0
        self._misses += tokens == 0
        self._hit_tokens += tokens

    def _match(self, path: TreePath) -> Match:
        pairs = tuple((block.keys, block.values) for block in path.blocks)
        return Match(path.tokens, self.layout, self.dtype, self.block_tokens, pairs, _snapshot(path))

    # Insertion. New rows start at a block boundary, so shared rows of a partly shared block are copied.

    def _first(self, rows: TreePath, stop: int) -> int:
        return stop if rows.tokens >= stop else rows.tokens // self.block_tokens * self.block_tokens

    def _size_bytes(self, rows: TreePath, stop: int) -> int:
        snapshots = MAX_SNAPSHOTS * self._shape.snapshot_bytes(stop)
        return (stop - self._first(rows, stop)) * self._shape.token_bytes + snapshots

    def _kept(self, rows: TreePath, stop: int) -> Block:
        """The last existing block before the new ones."""
        blocks = rows.blocks if rows.tokens >= stop else rows.blocks[: rows.tokens // self.block_tokens]
        return blocks[-1] if blocks else self._tree.root

    def _stop_that_fits(self, rows: TreePath, stop: int) -> int:
        """All tokens, or as many leading ones as fit. A model with sliding layers needs the end, so all or none."""
        wanted = self._size_bytes(rows, stop)
        if wanted <= self._tree.free_bytes or wanted <= (room := self._tree.room(self._kept(rows, stop))):
            return stop
        return 0 if self._shape.windows else self._first(rows, stop) + room // self._shape.token_bytes

    def _insertion(
        self, addresses: list[BlockAddress], rows: TreePath, tails: list[Tail], hold: Hold
    ) -> Insertion | None:
        try:
            pairs = self._pairs(addresses, rows)
        except MemoryError:  # the limit exceeds the machine's memory: no reason to fail a request
            self._release(hold)
            return None
        return Insertion(
            layout=self.layout,
            dtype=self.dtype,
            block_tokens=self.block_tokens,
            addresses=addresses,
            held=rows.tokens,
            pairs=pairs,
            tails=tails,
            adopt=partial(self._adopt, hold),
            release=partial(self._release, hold),
        )

    def _pairs(self, addresses: list[BlockAddress], rows: TreePath) -> dict[int, Pair]:
        """Memory for the new blocks; pages are touched when rows arrive."""
        first = self._first(rows, addresses[-1].stop)
        new = [each for each in addresses if each.start >= first]
        pairs = {each.start // self.block_tokens: self._shape.block_pair(each.length) for each in new}
        if pairs and (shared := rows.tokens - first):
            source, (keys, values) = rows.blocks[-1], pairs[first // self.block_tokens]
            keys[:, :shared], values[:, :shared] = source.keys[:, :shared], source.values[:, :shared]
        return pairs

    def _release(self, hold: Hold) -> None:
        with self._lock:
            self._tree.release(hold)

    def _adopt(
        self, hold: Hold, addresses: list[BlockAddress], blocks: dict[int, Block], snapshots: dict[int, Snapshot]
    ) -> int:
        with self._lock:
            path = self._tree.grow(addresses, blocks)
            for position, snapshot in snapshots.items():
                if (number := (position - 1) // self.block_tokens) < len(path):
                    self._tree.give(path[number], {position: snapshot})
            self._tree.release(hold)
            self._tree.touch(path, self._clock())
        if self.disk:
            for block in path:
                self.disk.write(self._root, self._shape, block)
        return addresses[len(path) - 1].stop if path else 0

    # Loading from disk.

    def _bring_back(self, addresses: list[BlockAddress], disk: DiskTier) -> None:
        """Load the best path's blocks into memory, up to the first that is damaged or does not fit."""
        with self._lock:
            path = self._tree.path(addresses, self._reach, disk)
        parent = self._tree.root
        for item in path.items:
            block = item if isinstance(item, Block) else self._load(item, parent, disk)
            if block is None:
                return
            parent = block

    def _load(self, label: Label, parent: Block, disk: DiskTier) -> Block | None:
        with self._lock:
            hold = self._tree.hold(label.size_bytes, parent)
        if hold is None:
            return None
        block = added = None
        try:
            block = disk.read(label, self._shape)
        finally:
            with self._lock:
                if block and block.size_bytes <= hold.size_bytes:  # it is larger if it was rewritten meanwhile
                    added = self._tree.add(parent, block)
                    self._tree.touch([added] if added else [], self._clock())
                self._tree.release(hold)
        return added


def _snapshot(path: TreePath) -> Snapshot:
    """The windows of sliding layers at the end of the path; empty without sliding layers or without a path."""
    return path.blocks[-1].snapshots.get(path.tokens, ()) if path.items else ()
