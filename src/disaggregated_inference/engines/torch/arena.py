"""Where torch keeps the KV of all sequences: per layer one flat [rows, kv_heads, head_dim] tensor for K and one for V.

That is the portable layout itself, so a slice goes in with one copy and comes out as a view. A sequence owns one run of
rows in the full layers and one ring of `window` rows in the sliding ones (position p sits at p modulo window: RoPE is
already applied, and attention does not care in which order its keys lie). Joining or leaving a batch moves nothing.
"""

from typing import NamedTuple

import numpy as np
import torch

from disaggregated_inference.errors import KVMemoryFull
from disaggregated_inference.kv import KVDType, KVLayout
from disaggregated_inference.kv.dtype import Array

TORCH_DTYPES: dict[KVDType, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}

Starts = dict[int, int]  # window (0: full) -> first row of the sequence's region


class _Gap(NamedTuple):
    start: int
    size: int


class _LayerRows:
    """First-fit allocation of runs of rows."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._gaps = [_Gap(0, count)]
        self._taken: dict[int, int] = {}

    def take(self, size: int) -> int:
        for index, gap in enumerate(self._gaps):
            if gap.size >= size:
                self._gaps[index : index + 1] = [_Gap(gap.start + size, gap.size - size)] if gap.size > size else []
                self._taken[gap.start] = size
                return gap.start
        free = sum(gap.size for gap in self._gaps)
        raise KVMemoryFull(f"no room for {size} tokens of KV: {free} of {self.count} free, not in one piece")

    def give_back(self, start: int) -> None:
        gaps = sorted([*self._gaps, _Gap(start, self._taken.pop(start))])
        self._gaps = gaps[:1]
        for gap in gaps[1:]:
            last = self._gaps[-1]
            if last.start + last.size == gap.start:
                self._gaps[-1] = _Gap(last.start, last.size + gap.size)
            else:
                self._gaps.append(gap)

    @property
    def used(self) -> int:
        return sum(self._taken.values())


class TorchArena:
    """The tensors and who owns which rows. The first ring and a row of padding serve unused places of a batch."""

    def __init__(
        self, layout: KVLayout, dtype: KVDType, device: torch.device, budget_bytes: int, sequences: int
    ) -> None:
        self.layout, self.dtype, self.device = layout, dtype, device
        ring_rows = {plan.window: plan.window * (sequences + 1) for plan in layout.layers if plan.window}
        ring_bytes = sum(ring_rows.get(plan.window, 0) for plan in layout.layers) * layout.row_bytes(dtype)
        token_bytes = max(layout.token_bytes(dtype), 1)
        full_rows = max((budget_bytes - ring_bytes) // token_bytes, 0)
        if full_rows < 2:
            raise KVMemoryFull(f"a KV budget of {budget_bytes} bytes holds no token; one takes {token_bytes}")
        self._rows = {0: _LayerRows(full_rows)} | {window: _LayerRows(rows) for window, rows in ring_rows.items()}
        self.padding = {window: rows.take(max(window, 1)) for window, rows in self._rows.items()}
        self.limit_bytes = (full_rows - 1) * token_bytes  # rings have room of their own, one for each sequence
        self.keys = [self._tensor(plan.window) for plan in layout.layers]
        self.values = [self._tensor(plan.window) for plan in layout.layers]

    def _tensor(self, window: int) -> torch.Tensor:
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

    def ring(self, starts: Starts, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
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
        """What sequences hold, in full layers and in rings; the padding is nobody's."""
        rows = {window: rows.used - max(window, 1) for window, rows in self._rows.items()}
        return sum(rows[plan.window] for plan in self.layout.layers) * self.layout.row_bytes(self.dtype)

    def ring_rows(self, start: int, window: int, first: int, stop: int) -> torch.Tensor:
        """Rows of positions [first, stop) in a ring, oldest first."""
        return start + torch.arange(first, stop, device=self.device) % window


def host_array(tensor: torch.Tensor, dtype: KVDType) -> Array:
    """A numpy view of a tensor in host memory; bfloat16 as its bits."""
    array: Array = tensor.view(torch.uint16).numpy() if dtype == "bfloat16" else tensor.numpy()
    return array


def host_tensor(array: Array, dtype: KVDType) -> torch.Tensor:
    """The other way; read-only arrays (a received buffer, a mapped file) are fine, we only read."""
    if not array.flags.writeable:
        array = np.array(array)
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
