"""The KV memory of the torch engine: per layer one flat [rows, kv_heads, head_dim] tensor for K and one for V.

This is the portable layout, so a slice is written with one copy and read as a view. A sequence owns one run of rows in
the full layers and one ring of `window` rows in the sliding ones (position p is at p modulo window: RoPE is already
applied, and attention does not depend on the order of keys). Joining or leaving a batch moves nothing.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from disaggregated_inference.engines.row_allocator import RowAllocator
from disaggregated_inference.errors import KVMemoryFull
from disaggregated_inference.kv import Array, KVDType, KVLayout

TORCH_DTYPES: dict[KVDType, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}

Starts = dict[int, int]  # window (0: full) -> first row of the sequence's region


class TorchArena:
    """The tensors, and which sequence owns which rows. The first ring and one row are padding for unused slots."""

    def __init__(
        self, layout: KVLayout, dtype: KVDType, device: torch.device, budget_bytes: int, sequences: int
    ) -> None:
        self.layout, self.dtype, self.device = layout, dtype, device
        ring_rows = {plan.window: plan.window * (sequences + 1) for plan in layout.layers if plan.window}
        ring_bytes = sum(ring_rows.get(plan.window, 0) for plan in layout.layers) * layout.row_bytes(dtype)
        token_bytes = max(layout.token_bytes(dtype), 1)
        full_rows = max((budget_bytes - ring_bytes) // token_bytes, 0)
        if full_rows < 2:
            raise KVMemoryFull(f"a KV budget of {budget_bytes} bytes is too small: one token takes {token_bytes}")
        self._rows = {0: RowAllocator(full_rows)} | {window: RowAllocator(rows) for window, rows in ring_rows.items()}
        self.padding = {window: rows.take(max(window, 1)) for window, rows in self._rows.items()}
        self.limit_bytes = (full_rows - 1) * token_bytes  # rings are extra, one for each sequence
        self.keys = [self._tensor(plan.window) for plan in layout.layers]
        self.values = [self._tensor(plan.window) for plan in layout.layers]

    def _tensor(self, window: int) -> Tensor:
        shape = (self._rows[window].count, self.layout.kv_heads, self.layout.head_dim)
        return torch.empty(shape, dtype=TORCH_DTYPES[self.dtype], device=self.device)

    def take(self, tokens: int) -> Starts:
        starts: Starts = {}
        try:
            for window, rows in self._rows.items():
                starts[window] = rows.take(window or tokens)
        except KVMemoryFull:
            self.give_back(starts)
            raise
        return starts

    def give_back(self, starts: Starts) -> None:
        for window, start in starts.items():
            self._rows[window].give_back(start)

    def ring(self, starts: Starts, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of a sequence's ring in a sliding layer, as views."""
        window = self.layout.layers[layer].window
        span = slice(starts[window], starts[window] + window)
        return self.keys[layer][span], self.values[layer][span]

    @property
    def full_rows(self) -> int:
        return self._rows[0].count

    @property
    def used_rows(self) -> int:
        """Rows that sequences hold in the full layers."""
        return self._rows[0].used - 1

    @property
    def used_bytes(self) -> int:
        """What sequences hold in full layers and rings, without the padding."""
        rows = {window: rows.used - max(window, 1) for window, rows in self._rows.items()}
        return sum(rows[plan.window] for plan in self.layout.layers) * self.layout.row_bytes(self.dtype)

    def where(self, start: int, window: int, first: int, stop: int) -> Any:
        """The rows of positions [first, stop) in a region that begins at `start`; in a ring oldest first."""
        if window:
            return start + torch.arange(first, stop, device=self.device) % window
        return slice(start + first, start + stop)


def host_array(tensor: Tensor, dtype: KVDType) -> Array:
    """A numpy view of a tensor in host memory; bfloat16 as its bits."""
    array: Array = tensor.view(torch.uint16).numpy() if dtype == "bfloat16" else tensor.numpy()
    return array


def host_tensor(array: Array, dtype: KVDType) -> Tensor:
    """The reverse of `host_array`; copies read-only arrays (a received buffer, a mapped file)."""
    if not array.flags.writeable:
        array = np.array(array)
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
