"""Decode steps as CUDA graphs: a step is launched once instead of some two thousand times.

One graph per batch size of a short list; a batch runs in the next larger one, its empty places pointing at a padding
region. Everything that changes between steps (tokens, positions, rows) lives in tensors of fixed address.
"""

from collections.abc import Callable

import torch

from disaggregated_inference.engines.torch.passes import Places

Decode = Callable[[torch.Tensor, int], torch.Tensor]


class DecodeGraphs:
    def __init__(self, decode: Decode, places: Places, largest: int) -> None:
        self._decode, self._places = decode, places
        self._sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size < largest] + [largest]
        self._ids = torch.zeros(largest, dtype=torch.long, device=places.table.device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def run(self, ids: torch.Tensor, size: int) -> torch.Tensor:
        """Logits of the first `size` places; overwritten by the next run of the same graph size."""
        bucket = next(s for s in self._sizes if s >= size)
        self._ids[:size].copy_(ids, non_blocking=True)
        if bucket not in self._graphs:
            self._graphs[bucket] = self._capture(bucket)
        graph, logits = self._graphs[bucket]
        graph.replay()
        return logits[:size].clone()

    def _capture(self, size: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Warm-up and capture write only the rows that the real run will write again, with the same values."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._decode(self._ids[:size], size)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self._decode(self._ids[:size], size)
        return graph, logits
