"""Decode batches: one per capacity class, all classes in one forward pass.

mlx-lm pads the members of a batch on the left into one cache per layer, so members should have similar sizes: a
sequence's *class* is its capacity, rounded up to a power of two. While a sequence is in a batch, its rows are in the
batch's caches; it gets its own caches back when it leaves or is used alone. A sequence alone in its class keeps them.
"""

from collections.abc import Sequence as Items
from itertools import accumulate
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache

from disaggregated_inference.engines.mlx.grouped import GroupedCache
from disaggregated_inference.engines.sequence import Sequence, broken_on_error

SMALLEST_CLASS = 256


def capacity_class(capacity: int, smallest: int = SMALLEST_CLASS) -> int:
    return max(smallest, 1 << (capacity - 1).bit_length())


class MlxBatch:
    """The sequences of one class, row by row.

    Changes go layer by layer, each evaluated before the next: old and new caches coexist for one layer only. A change
    that fails half-way breaks all members: no member's rows are complete any more.
    """

    def __init__(self) -> None:
        self._rows: dict[Sequence, int] = {}
        self._caches: list[Any] = []

    def caches_of(self, wanted: Items[Sequence]) -> tuple[list[Any], Items[Sequence]]:
        """Caches whose rows are the `wanted` sequences, and the order of the rows."""
        if len(wanted) == 1 and wanted[0] not in self._rows:
            return [layer.cache for layer in wanted[0].state], wanted
        if self._rows.keys() != set(wanted):
            self._regroup(set(wanted), [sequence for sequence in wanted if sequence not in self._rows])
        return self._caches, tuple(self._rows)

    def take_back(self, sequence: Sequence) -> None:
        """Move a sequence's rows back into its own caches."""
        if sequence in self._rows:
            self._regroup(self._rows.keys() - {sequence}, [])

    def drop(self, sequence: Sequence) -> None:
        """Drop a sequence's rows, and those of broken sequences."""
        if sequence in self._rows:
            self._change([member for member in self._rows if member is not sequence and not member.broken], [], [])

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self._caches)

    def _regroup(self, wanted: set[Sequence], joining: list[Sequence]) -> None:
        staying = [member for member in self._rows if member in wanted]
        self._change(staying, [member for member in self._rows if member not in wanted], joining)

    def _change(self, staying: list[Sequence], leaving: list[Sequence], joining: list[Sequence]) -> None:
        members = [*staying, *joining]
        kept = [self._rows[member] for member in staying]
        capacity = max((member.capacity for member in members), default=0)
        caches = self._caches or [None] * len(joining[0].state)
        with broken_on_error(*self._rows, *joining):
            for layer, cache in enumerate(caches):
                for member in leaving:
                    member.state[layer].restore(cache.extract(self._rows[member]))
                caches[layer] = _changed(cache, kept, [sequence.state[layer] for sequence in joining], capacity)
        self._rows = {member: row for row, member in enumerate(members)}
        self._caches = caches if members else []


def _changed(cache: Any, kept: list[int], joining: list[Any], capacity: int) -> Any:
    """One layer's cache with its rows `kept`, followed by those of `joining`, evaluated."""
    if not kept:
        cache = None
    elif len(kept) < len(cache.left_padding):
        cache.filter(kept)
    if joining:
        merged = _merged([layer.cache for layer in joining])
        if cache is None:
            cache = merged
        else:
            cache.extend(merged)
    if cache is not None:
        _fit(cache, capacity)
        mx.eval([array for array in (cache.keys, cache.values) if array is not None], cache.offset, cache.left_padding)
    for layer in joining:
        layer.cache = None
    return cache


def _merged(own: list[Any]) -> Any:
    """mlx-lm's merge; it loses the shape of caches without tokens, which is restored."""
    merged = type(own[0]).merge(own)
    if merged.keys is None and own[0].keys is not None:
        _, heads, _, width = own[0].keys.shape
        merged.keys = merged.values = mx.zeros((len(own), heads, 0, width), own[0].keys.dtype)
    return merged


def _fit(cache: Any, capacity: int) -> None:
    """Resize the buffer to the largest capacity in the batch.

    mlx-lm would grow it in the middle of a step, in all layers at once and beyond the reserved memory. What mlx-lm cuts
    off stays in memory, because a cut is only a view.
    """
    if isinstance(cache, BatchKVCache):
        spare = capacity - cache.keys.shape[2]
        cache.keys, cache.values = _resized(cache.keys, spare), _resized(cache.values, spare)


def _resized(rows: mx.array, spare: int) -> mx.array:
    if spare > 0:
        return mx.pad(rows, [(0, 0), (0, 0), (0, spare), (0, 0)])
    return mx.contiguous(rows[..., : rows.shape[2] + spare, :])


class Arrangement(NamedTuple):
    """The order of a step's rows: `order[i]` is the caller's index of row i, None if both orders are the same."""

    caches: list[Any]
    order: list[int] | None

    def rows(self, inputs: mx.array) -> mx.array:
        """From the caller's order to the rows' order."""
        return inputs if self.order is None else inputs[mx.array(self.order)]

    def callers(self, outputs: mx.array) -> mx.array:
        """From the rows' order to the caller's."""
        if self.order is None:
            return outputs
        return outputs[mx.array(sorted(range(len(self.order)), key=self.order.__getitem__))]


class Batches:
    def __init__(self, smallest: int = SMALLEST_CLASS) -> None:
        self._smallest = smallest
        self._by_class: dict[int, MlxBatch] = {}

    def arrange(self, sequences: Items[Sequence]) -> Arrangement:
        """Caches for one step of `sequences`. Other classes stay unchanged."""
        groups: dict[int, list[Sequence]] = {}
        for sequence in sequences:
            groups.setdefault(capacity_class(sequence.capacity, self._smallest), []).append(sequence)
        parts = [self._batch(members[0]).caches_of(members) for members in groups.values()]
        rows = [sequence for _, members in parts for sequence in members]
        caches = parts[0][0] if len(parts) == 1 else _grouped(parts)
        place = {sequence: at for at, sequence in enumerate(sequences)}
        order = [place[sequence] for sequence in rows]
        return Arrangement(caches, None if order == list(range(len(order))) else order)

    def take_back(self, sequence: Sequence) -> None:
        self._batch(sequence).take_back(sequence)

    def drop(self, sequence: Sequence) -> None:
        self._batch(sequence).drop(sequence)

    @property
    def nbytes(self) -> int:
        return sum(batch.nbytes for batch in tuple(self._by_class.values()))

    def _batch(self, sequence: Sequence) -> MlxBatch:
        return self._by_class.setdefault(capacity_class(sequence.capacity, self._smallest), MlxBatch())


def _grouped(parts: list[tuple[list[Any], Items[Sequence]]]) -> list[GroupedCache]:
    """One cache per layer over the groups. Positions are set from the sequences' lengths: nothing else would evaluate
    mlx-lm's lazy counters, and their additions would pile up step by step."""
    lengths = [[sequence.length for sequence in members] for _, members in parts]
    for (caches, _), positions in zip(parts, map(mx.array, lengths), strict=True):
        for cache in caches:
            if isinstance(cache.offset, mx.array):  # of a batch; a single sequence has an int
                cache.offset = positions
    offset = mx.array([length for group in lengths for length in group])
    edges = list(accumulate(len(group) for group in lengths[:-1]))
    return [GroupedCache(list(layer), edges, offset) for layer in zip(*(caches for caches, _ in parts), strict=True)]
