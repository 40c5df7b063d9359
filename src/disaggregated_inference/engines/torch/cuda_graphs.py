"""Forward passes as CUDA graphs: one launch instead of thousands, which is what limits small passes.

Everything that changes between runs (tokens, positions, rows) is in tensors with fixed addresses. There are graphs for
a few sizes; a pass uses the next larger one, and its unused entries point at the padding.
"""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import NamedTuple

import torch
from torch import Tensor

from disaggregated_inference.engines.base import Emit
from disaggregated_inference.engines.sequence import Sequence
from disaggregated_inference.engines.torch.arena import TorchArena
from disaggregated_inference.engines.torch.forward_pass import ChunkPass, HostCopies
from disaggregated_inference.engines.torch.graph_inputs import ChunkTable, Places

log = logging.getLogger(__name__)

Decode = Callable[[Tensor, int], Tensor]
Chunk = Callable[[ChunkTable, int, ChunkPass], Tensor]


class DecodeGraphs:
    """One graph per batch size of a short list."""

    def __init__(self, decode: Decode, places: Places, largest: int) -> None:
        self._decode, self._places = decode, places
        self._sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size < largest] + [largest]
        self._ids = torch.zeros(largest, dtype=torch.long, device=places.table.device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def run(self, ids: Tensor, size: int) -> Tensor:
        """Logits of the first `size` sequences."""
        bucket = next(s for s in self._sizes if s >= size)
        self._ids[:size].copy_(ids, non_blocking=True)
        if bucket not in self._graphs:
            self._graphs[bucket] = self._capture(bucket)
        graph, logits = self._graphs[bucket]
        graph.replay()
        return logits[:size].clone()

    def _capture(self, size: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Warm-up and capture write only the rows that the real run will write again, with the same values."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._decode(self._ids[:size], size)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may wait for copies meanwhile
            logits = self._decode(self._ids[:size], size)
        return graph, logits


class _Pieces(NamedTuple):
    """A chunk's graphs in order; each but the last ends when a layer's K and V are written."""

    graphs: list[torch.cuda.CUDAGraph]
    logits: Tensor


class ChunkGraphs:
    """Short prefill chunks, one set of graphs per chunk size. A set is split where a layer's K and V are in the arena:
    its slice is emitted there, while the next graph computes.

    Longer chunks keep the GPU busy without graphs, and their attention kernels are faster.
    """

    sizes = (32, 64, *range(128, 2049, 128))

    def __init__(self, compute: Chunk, arena: TorchArena, host: HostCopies) -> None:
        self._compute, self._arena, self._host = compute, arena, host
        self._table = ChunkTable(arena, self.sizes[-1])
        self._sets: dict[int, _Pieces] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._usable = True

    def fits(self, count: int) -> bool:
        return self._usable and count < self.sizes[-1]

    def run(self, sequence: Sequence, tokens: Items[int], emit: Emit | None) -> Tensor | None:
        """The logits of the last token; None if this model cannot be captured, and then nothing was computed."""
        size = next(size for size in self.sizes if size >= len(tokens))
        self._table.load(sequence, tokens, size)
        pieces = self._sets.get(size) or self._try_capture(size)
        if pieces is None:
            return None
        start, stop = sequence.length, sequence.length + len(tokens)
        at = slice(sequence.state.starts[0] + start, sequence.state.starts[0] + stop)
        if emit:
            self._host.begin(start, stop)
        for layer, graph in enumerate(pieces.graphs[:-1]):
            graph.replay()
            if emit:
                emit(self._host.slice(layer, start, self._arena.keys[layer][at], self._arena.values[layer][at]))
        pieces.graphs[-1].replay()
        return pieces.logits.clone()

    def _try_capture(self, size: int) -> _Pieces | None:
        try:
            self._sets[size] = self._capture(size)
        except RuntimeError as error:
            log.warning("prefill runs without CUDA graphs: %s", error)
            self._usable = False
        return self._sets.get(size)

    def _capture(self, size: int) -> _Pieces:
        """On a side stream; writes only the rows that the real run will write again, with the same values."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        graphs = [torch.cuda.CUDAGraph()]
        with torch.cuda.stream(side):
            self._compute(self._table, size, ChunkPass(self._arena, self._table, size, lambda: None))
            side.synchronize()

            def begin() -> None:
                graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

            def cut() -> None:
                graphs[-1].capture_end()
                graphs.append(torch.cuda.CUDAGraph())
                begin()

            begin()
            try:
                logits = self._compute(self._table, size, ChunkPass(self._arena, self._table, size, cut))
            finally:
                graphs[-1].capture_end()
        torch.cuda.current_stream().wait_stream(side)
        return _Pieces(graphs, logits)
