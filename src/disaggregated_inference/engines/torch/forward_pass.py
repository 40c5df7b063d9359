"""One forward pass through transformers, from the cache's side: what each layer writes, reads and emits.

A pass takes the place of transformers' cache. The model calls `update` with a layer's new K and V, then our attention
function, which calls `attend` of the same pass.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

from disaggregated_inference.engines.base import Emit
from disaggregated_inference.engines.sequence import Sequence
from disaggregated_inference.engines.torch.arena import TORCH_DTYPES, TorchArena, host_array
from disaggregated_inference.engines.torch.attention import Rows, attend, attend_rows, flash_ranges, has_flash
from disaggregated_inference.engines.torch.graph_inputs import ChunkTable, Places
from disaggregated_inference.kv import KVSlice

ATTENTION_NAME = "disagg_arena"

TensorPair = tuple[Tensor, Tensor]


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float,
    arena_pass: "PrefillPass | ChunkPass | DecodePass",
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    return arena_pass.attend(module.layer_idx, query, key, value, scaling, s_aux), None


# transformers builds no mask for a name that it does not know, and none is needed.
AttentionInterface.register(ATTENTION_NAME, _attention)


class PrefillPass:
    """A chunk of one sequence. Queries are the last n of the rows that `update` returns."""

    def __init__(
        self, arena: TorchArena, sequence: Sequence, tokens: int, emit: Emit | None, host: "HostCopies"
    ) -> None:
        self.arena, self.starts = arena, sequence.state.starts
        self.begin, self.tokens, self.emit, self.host = sequence.length, tokens, emit, host
        if emit:
            host.begin(sequence.length, sequence.length + tokens)

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> TensorPair:
        rows = (key[0].transpose(0, 1), value[0].transpose(0, 1))
        window = self.arena.layout.layers[layer].window
        return self._sliding(layer, window, rows) if window else self._full(layer, rows)

    def _full(self, layer: int, rows: TensorPair) -> TensorPair:
        first = self.starts[0]
        at = first + self.begin
        stop = at + self.tokens
        keys, values = self.arena.keys[layer], self.arena.values[layer]
        keys[at:stop], values[at:stop] = rows
        self._emit_slice(layer, self.begin, keys[at:stop], values[at:stop])
        return keys[first:stop], values[first:stop]

    def _sliding(self, layer: int, window: int, rows: TensorPair) -> TensorPair:
        stop = self.begin + self.tokens
        kept = max(self.begin, stop - window)
        before = self.arena.where(self.starts[window], window, max(0, self.begin - window + 1), self.begin)
        after = self.arena.where(self.starts[window], window, kept, stop)
        visible = []
        fresh = []
        for ring, new in zip((self.arena.keys[layer], self.arena.values[layer]), rows, strict=True):
            visible.append(torch.cat([ring[before], new]))
            fresh.append(new[kept - self.begin :].contiguous())
            ring[after] = fresh[-1]
        self._emit_slice(layer, kept, *fresh)
        return visible[0], visible[1]

    def _emit_slice(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        if self.emit:
            self.emit(self.host.slice(layer, start, keys, values))

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None
    ) -> Tensor:
        window = self.arena.layout.layers[layer].window
        return attend(query[0].transpose(0, 1), key, value, scale, window, sinks).unsqueeze(0)


class HostCopies:
    """Copies rows from the device to slices in host memory without delaying the model.

    On the CPU the rows are in host memory already: the slice is a view, valid until the sequence is closed. On CUDA a
    side stream copies them into pinned memory, and the slice waits for that copy when it is read. Short prompts are
    bound by the host's kernel launches, so memory is prepared once per chunk.
    """

    def __init__(self, arena: TorchArena) -> None:
        self.arena, self.dtype = arena, arena.dtype
        self.stream = torch.cuda.Stream(arena.device) if arena.device.type == "cuda" else None
        if self.stream is not None:
            self._computed = [torch.cuda.Event() for _ in arena.layout.layers]

    def finish(self) -> None:
        """After this call rows may be freed: later writes run after the copies."""
        if self.stream is not None:
            torch.cuda.current_stream(self.arena.device).wait_stream(self.stream)

    def begin(self, start: int, stop: int) -> None:
        """Pinned memory for all slices of one chunk."""
        if self.stream is None:
            return
        layout = self.arena.layout
        rows = [stop - plan.first_row(start, stop) for plan in layout.layers for _ in ("keys", "values")]
        shape = (sum(rows), layout.kv_heads, layout.head_dim)
        chunk = torch.empty(shape, dtype=TORCH_DTYPES[self.dtype], pin_memory=True)
        self._tensors = chunk.split(rows)
        self._arrays = np.split(host_array(chunk, self.dtype), np.cumsum(rows[:-1]))
        self._computing = torch.cuda.current_stream(self.arena.device)

    def slice(self, layer: int, start: int, keys: Tensor, values: Tensor) -> KVSlice:
        if self.stream is None:
            return KVSlice(layer, start, self.dtype, host_array(keys, self.dtype), host_array(values, self.dtype))
        self._computed[layer].record(self._computing)
        self.stream.wait_event(self._computed[layer])
        torch.cuda.set_stream(self.stream)
        self._tensors[2 * layer].copy_(keys, non_blocking=True)
        self._tensors[2 * layer + 1].copy_(values, non_blocking=True)
        copied = self.stream.record_event()
        torch.cuda.set_stream(self._computing)
        if self.arena.layout.layers[layer].window:  # not arena memory: keep it until it is copied
            keys.record_stream(self.stream)
            values.record_stream(self.stream)
        arrays = self._arrays[2 * layer : 2 * layer + 2]
        return KVSlice(layer, start, self.dtype, arrays[0], arrays[1], copied.synchronize, copied.query)


class ChunkPass:
    """A chunk of `size` tokens with all inputs in a device table, so that a CUDA graph can replay it. `wrote` is called
    when a layer's K and V are in the arena. Full layers only."""

    def __init__(self, arena: TorchArena, table: ChunkTable, size: int, wrote: Callable[[], None]) -> None:
        self.arena, self.table, self.size, self.wrote = arena, table, size, wrote
        self.rows = table.rows[:size].long()

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> TensorPair:
        keys, values = self.arena.keys[layer], self.arena.values[layer]
        keys.index_copy_(0, self.rows, key[0].transpose(0, 1))
        values.index_copy_(0, self.rows, value[0].transpose(0, 1))
        self.wrote()
        return keys, values

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None
    ) -> Tensor:
        table, rows = self.table, query[0].transpose(0, 1)
        out = flash_ranges(rows, key, value, table.begins, table.lengths, table.query_starts, self.size, scale, sinks)
        return out.unsqueeze(0)


class DecodePass:
    """One new token for each of `size` sequences."""

    def __init__(self, arena: TorchArena, places: Places, size: int) -> None:
        self.arena, self.places, self.size = arena, places, size
        self.query_starts = torch.arange(size + 1, dtype=torch.int32, device=arena.device)
        self._known: dict[int, Rows] = {}
        self._written = {window: places.rows(window)[0][:size].long() for window in places.windows}

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> TensorPair:
        keys, values = self.arena.keys[layer], self.arena.values[layer]
        at = self._written[self.arena.layout.layers[layer].window]
        keys.index_copy_(0, at, key.squeeze(2))
        values.index_copy_(0, at, value.squeeze(2))
        return keys, values

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None
    ) -> Tensor:
        if has_flash(query.device, query.dtype):
            _, begin, count = self.places.rows(self.arena.layout.layers[layer].window)
            rows = query[:, :, 0]
            out = flash_ranges(
                rows, key, value, begin[: self.size + 1], count[: self.size], self.query_starts, 1, scale, sinks
            )
            return out.unsqueeze(1)
        rows = self._rows(self.arena.layout.layers[layer].window)
        return attend_rows(query.squeeze(2), key, value, scale, rows, sinks)

    def _rows(self, window: int) -> Rows:
        if window not in self._known:
            self._known[window] = Rows.of(self.places.spans(window)[: self.size], self.arena.device)
        return self._known[window]
