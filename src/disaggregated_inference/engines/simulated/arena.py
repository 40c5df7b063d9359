"""The KV memory of all sequences, real bytes in numpy.

Full layers share one array, [layers, K and V, rows, elements], of which a sequence owns a run of rows: the portable
layout, so slices are views. Freed memory is reused without clearing: new pages from the kernel would cost more than
everything else here. A sliding layer has a ring per sequence, position p at p modulo window; received slices go to a
copy of it, because a rollback needs the rows that they overwrite.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from disaggregated_inference.engines.row_allocator import RowAllocator
from disaggregated_inference.errors import KVMemoryFull
from disaggregated_inference.kv import Array, KVDType, KVLayout, storage_dtype


@dataclass(eq=False, slots=True)
class SimulatedRows:
    """One sequence's memory, and the hash of its tokens."""

    first: int
    rows: int
    rings: dict[int, Array]
    hash: int
    unwritten: list[int] = field(default_factory=list)  # hashes of the last tokens, whose rows are not written yet
    arriving: dict[int, Array] = field(default_factory=dict)

    @property
    def ring_bytes(self) -> int:
        return sum(ring.nbytes for rings in (self.rings, self.arriving) for ring in tuple(rings.values()))


class SimulatedArena:
    def __init__(self, layout: KVLayout, dtype: KVDType, budget_bytes: int) -> None:
        self._layout, self._storage = layout, storage_dtype(dtype)
        self._width = layout.kv_heads * layout.head_dim
        self._token_bytes = layout.token_bytes(dtype)
        self._taken = RowAllocator(budget_bytes // max(self._token_bytes, 1))
        if self._taken.count < 1:
            raise KVMemoryFull(f"a KV budget of {budget_bytes} bytes is too small: one token takes {self._token_bytes}")
        full = [layer for layer, plan in enumerate(layout.layers) if not plan.window]
        self._places = {layer: place for place, layer in enumerate(full)}
        # Zeros that were never written take no memory, and are finite when read.
        self._rows = np.zeros((len(full), 2, self._taken.count if full else 0, self._width), self._storage)

    def take(self, capacity: int, start_hash: int) -> SimulatedRows:
        first = self._taken.take(capacity)
        windows = {layer: plan.window for layer, plan in enumerate(self._layout.layers) if plan.window}
        rings = {layer: np.zeros((2, window, self._width), self._storage) for layer, window in windows.items()}
        return SimulatedRows(first, capacity, rings, start_hash)

    def give_back(self, held: SimulatedRows) -> None:
        self._taken.give_back(held.first)
        held.rings, held.arriving = {}, {}

    def area(self, held: SimulatedRows, layer: int) -> Array:
        """A layer's K and V: [2, rows, elements], for a sliding layer its ring."""
        if layer in held.rings:
            return held.arriving.get(layer, held.rings[layer])
        return self._rows[self._places[layer], :, held.first : held.first + held.rows]

    def arriving(self, held: SimulatedRows, layer: int) -> Array:
        """The same, for slices that are not committed yet."""
        if layer in held.rings and layer not in held.arriving:
            held.arriving[layer] = held.rings[layer].copy()
        return self.area(held, layer)

    def where(self, layer: int, start: int, stop: int) -> slice | NDArray[np.int64]:
        """The indices of these positions in a layer's area, oldest first."""
        window = self._layout.layers[layer].window
        return np.arange(start, stop) % window if window else slice(start, stop)

    def used_bytes(self) -> int:
        return self._token_bytes * self._taken.used
