"""Insertion into the prefix cache: turns slices into blocks and snapshots."""

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from disaggregated_inference.kv.dtype import Array, KVDType, as_dtype
from disaggregated_inference.kv.layout import KVLayout, KVSlice
from disaggregated_inference.kv.prefix_cache.blocks import (
    MAX_SNAPSHOTS,
    Block,
    BlockAddress,
    BlockShape,
    Pair,
    Snapshot,
    cut,
    frozen,
    spans,
)

Adopt = Callable[[list[BlockAddress], dict[int, Block], dict[int, Snapshot]], int]


class Tail(NamedTuple):
    """The last rows of a sliding layer at `stop`; fewer than its window if earlier rows are unknown."""

    stop: int
    keys: Array
    values: Array


class Insertion:
    """A sequence's new rows. They become visible with `finish`; `finish` and `abandon` release the reserved memory.
    Several threads may `put`, each layer's slices in order."""

    def __init__(
        self,
        layout: KVLayout,
        dtype: KVDType,
        block_tokens: int,
        addresses: list[BlockAddress],
        held: int,
        pairs: dict[int, Pair],
        tails: list[Tail],
        adopt: Adopt,
        release: Callable[[], None],
    ) -> None:
        self._layout, self._dtype, self._addresses = layout, dtype, addresses
        self._pairs, self._adopt, self._release = pairs, adopt, release
        self._stop, self._block_tokens = addresses[-1].stop, block_tokens
        self._windows = BlockShape.of(layout, dtype).windows
        self._filled = [held] * (len(layout.layers) - len(self._windows))
        self._tails = [deque([tail]) for tail in tails] or [deque[Tail]() for _ in self._windows]
        self._ended, self._ending = False, threading.Lock()
        # The first position whose rows are needed. Sliding layers need their whole window again, for a snapshot.
        self.start = min(held, max(0, self._stop - max(self._windows))) if self._windows else held

    def put(self, piece: KVSlice) -> None:
        """Copy the needed rows of a slice. A gap before it is no error: less is kept in the end."""
        piece.require_fits(self._layout)
        piece.wait()
        kind = self._layout.layers[piece.layer].kind
        row = sum(plan.kind == kind for plan in self._layout.layers[: piece.layer])
        if self._ended:
            return
        if kind == "full":
            self._put_rows(row, piece)
        else:
            self._put_window(row, piece)

    def finish(self) -> int:
        """Publish the tokens that are complete in all full layers. Returns how many leading tokens the cache holds."""
        if not self._end():
            return 0
        complete = min(self._filled)
        addresses = cut(self._addresses, complete)
        blocks = {number: self._block(addresses[number]) for number in self._pairs if number < len(addresses)}
        snapshots = self._snapshots(complete)
        self._forget()
        return self._adopt(addresses, blocks, snapshots)

    def abandon(self) -> None:
        """Keep nothing. Harmless after `finish`, and while another thread is in `put`."""
        if self._end():
            self._forget()
            self._release()

    def _end(self) -> bool:
        with self._ending:
            first, self._ended = not self._ended, True
        return first

    def _forget(self) -> None:
        """The caller may keep a finished insertion; its memory is no longer counted, so it must be freed."""
        self._pairs, self._tails = {}, [deque() for _ in self._windows]

    def _put_rows(self, row: int, piece: KVSlice) -> None:
        pairs, begin, stop = self._pairs, self._filled[row], min(piece.stop, self._stop)
        if not pairs or not piece.start <= begin < stop:
            return
        for number, low, high in spans(begin, stop, self._block_tokens):
            shift = number * self._block_tokens - piece.start
            for kept, given in zip(pairs[number], (piece.keys, piece.values), strict=True):
                kept[row, low:high] = as_dtype(given[shift + low : shift + high], piece.dtype, self._dtype)
        self._filled[row] = stop

    def _put_window(self, row: int, piece: KVSlice) -> None:
        tails, window, stop = self._tails[row], self._windows[row], min(piece.stop, self._stop)
        last = tails[-1] if tails else None
        begin = max(piece.start, last.stop) if last else piece.start
        if stop <= begin:
            return
        while len(tails) >= MAX_SNAPSHOTS:  # before the new one is made: only this much is reserved
            tails.popleft()
        before = (last.keys, last.values) if last and last.stop == begin else (piece.keys[:0], piece.values[:0])
        joined = []
        for old, given in zip(before, (piece.keys, piece.values), strict=True):
            new = as_dtype(given[begin - piece.start : stop - piece.start], piece.dtype, self._dtype)
            old = old[max(0, len(old) + len(new) - window) :] if len(old) else new[:0]
            joined.append(np.concatenate([old, new]))
        tails.append(Tail(stop, *joined))

    def _block(self, address: BlockAddress) -> Block:
        """The rows of a block; a copy if it is incomplete, so that no unused memory stays allocated."""
        number = address.start // self._block_tokens
        pair = self._pairs[number]
        if address.length < pair[0].shape[1]:
            pair = (pair[0][:, : address.length].copy(), pair[1][:, : address.length].copy())
        return Block(address, frozen(pair[0]), frozen(pair[1]))

    def _snapshots(self, complete: int) -> dict[int, Snapshot]:
        """The positions at which every sliding layer's window is known."""
        known = [
            {tail.stop: tail for tail in tails if tail.stop <= complete and len(tail.keys) == min(window, tail.stop)}
            for tails, window in zip(self._tails, self._windows, strict=True)
        ]
        stops = sorted(set.intersection(*map(set, known))) if known else []
        return {at: tuple((frozen(each[at].keys), frozen(each[at].values)) for each in known) for at in stops}
