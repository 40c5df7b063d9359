"""Sequences that decode together. mlx-lm pads them on the left into one cache per layer; one alone keeps its own.

While a sequence is in the batch its rows live there; it gets its own caches back when it leaves or is touched alone.
"""

from collections.abc import Sequence as Items
from typing import Any

from disaggregated_inference.engines.base import Sequence


class Batch:
    def __init__(self) -> None:
        self._members: list[Sequence] = []
        self._caches: list[Any] = []

    def caches_of(self, sequences: Items[Sequence]) -> list[Any]:
        """Caches whose rows are `sequences`, in that order."""
        if len(sequences) == 1 and sequences[0] not in self._members:
            return [layer.cache for layer in sequences[0].state]
        if self._members != list(sequences):
            self._regroup(list(sequences))
        return self._caches

    def take_back(self, sequence: Sequence) -> None:
        """Give a sequence its own caches again."""
        if sequence in self._members:
            at = self._members.index(sequence)
            for layer, cache in zip(sequence.state, self._caches, strict=True):
                layer.restore(cache.extract(at))
            self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence and its rows."""
        if sequence in self._members:
            self._keep([member for member in self._members if member is not sequence])

    def _regroup(self, wanted: list[Sequence]) -> None:
        for member in [m for m in self._members if m not in wanted]:
            self.take_back(member)
        self._keep([member for member in wanted if member in self._members])
        joining = [sequence for sequence in wanted if sequence not in self._members]
        if joining:
            self._join(joining)
        self._keep(wanted)

    def _join(self, joining: list[Sequence]) -> None:
        per_layer = zip(*([layer.cache for layer in s.state] for s in joining), strict=True)
        merged = [type(row[0]).merge(list(row)) for row in per_layer]
        for cache, extra in zip(self._caches, merged, strict=False):
            cache.extend(extra)
        self._caches = self._caches or merged
        self._members += joining
        for sequence in joining:
            for layer in sequence.state:
                layer.cache = None

    def _keep(self, wanted: list[Sequence]) -> None:
        """These members, in this order."""
        if not wanted:
            self._members, self._caches = [], []
        elif wanted != self._members:
            at = [self._members.index(member) for member in wanted]
            for cache in self._caches:
                cache.filter(at)
            self._members = wanted
