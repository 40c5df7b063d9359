"""A worker's half of the connector: copies the rows that a step added from the pages into shared memory, layer by layer
while the next layer computes, and tells the node when they are there."""

import logging
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from disaggregated_inference.vllm_connector.connection import NodeLink
from disaggregated_inference.vllm_connector.messages import (
    Accept,
    Attach,
    Exported,
    ExportedRows,
    Failed,
    Grant,
    LogitsReady,
)
from disaggregated_inference.vllm_connector.pages import Pages
from disaggregated_inference.vllm_connector.region import RegionLayout, first_row
from disaggregated_inference.vllm_connector.scheduler import Group, Span
from disaggregated_inference.vllm_connector.streams import CopyStream, SharedTensor

log = logging.getLogger("vllm.disagg")


@dataclass(slots=True)
class Layer:
    """One attention layer of this worker. `heads` are the first of its KV heads and their number: those that this
    worker sends."""

    number: int
    group: int
    tensor: torch.Tensor
    heads: tuple[int, int]


@dataclass(slots=True)
class _Step:
    """What this step exports. The rows have an index by block table and window: with the hybrid manager off, layers
    with and without a window share one table."""

    spans: list[Span]
    index: dict[tuple[int, int], Any]
    waiting: set[str]  # layers that were not exported yet


class WorkerHalf:
    def __init__(
        self,
        path: str,
        attach: Attach,
        layout: RegionLayout,
        layers: Mapping[str, Layer],
        groups: Sequence[Group],
        pages: Pages,
        device: torch.device,
    ) -> None:
        self._layout, self._layers, self._groups, self._pages = layout, layers, groups, pages
        self._windows: tuple[int, ...] = ()  # of each layer, as the node has them
        self._stream = CopyStream(device)
        self._shared: SharedTensor | None = None
        self._step: _Step | None = None
        self.ending: set[str] = set()  # tickets whose prompt ends in this step
        self._link = NodeLink(path, attach, self._use_region)

    def begin(self, spans: list[Span]) -> None:
        """Before the forward pass."""
        self.ending = {span.ticket for span in spans if span.last}
        self._step = None
        granted = [span for span in spans if self._link.grant_of(span.ticket)]
        if granted and self._layers:
            with self._reporting([span.ticket for span in granted]):
                tables = {self._table(layer) for layer in self._layers.values()}
                index = {table: self._pages.index([self._slots(span, *table) for span in granted]) for table in tables}
                self._step = _Step(granted, index, set(self._layers))

    def export(self, name: str) -> None:
        """When the layer's rows are in the pages: before its attention or after it, or at the end of the step."""
        step = self._step
        if step and name in step.waiting:
            step.waiting.discard(name)
            with self._reporting([span.ticket for span in step.spans]):
                self._export(step, self._layers[name])

    def finish(self) -> None:
        """At the end of the step: export what was not seen (a CUDA graph of the whole model calls no connector), and
        let the next step wait until the rows are out of the pages."""
        for name in sorted(self._step.waiting) if self._step else ():
            self.export(name)
        self._stream.join()  # before the index of this step is freed
        self._step = None

    def export_logits(self, ticket: str, logits: torch.Tensor) -> None:
        """One row, before anything changes it."""
        with self._link.lock, self._reporting([ticket]):
            grant = self._link.grant_of(ticket)
            if grant and self._shared:
                at = grant.offset + self._layout.logits_at(grant.tokens)
                target = self._shared.view(at, (self._layout.vocabulary,), torch.float32)
                done = self._stream.copy_here(target, logits[: self._layout.vocabulary])
                self._link.send(LogitsReady(ticket=ticket), done)

    def close(self) -> None:
        self._link.close()

    @contextmanager
    def _reporting(self, tickets: Sequence[str]) -> Iterator[None]:
        """The node fails these requests. vLLM goes on: its other requests are not concerned."""
        try:
            yield
        except Exception as error:
            log.exception("the export of %s failed", tickets)
            if self._step:  # `finish` frees it: the device may still read its index
                self._step.waiting.clear()
            for ticket in tickets:
                self._link.send(Failed(ticket=ticket, reason=f"{type(error).__name__}: {error}"[:500]))

    def _use_region(self, accept: Accept, memory: mmap.mmap) -> None:
        """Of a new node. Copies into the old one's memory have ended when it is dropped."""
        expected = (self._layout.kv_heads, self._layout.head_dim, self._layout.layers, self._layout.vocabulary)
        if (accept.kv_heads, accept.head_dim, accept.layers, accept.vocabulary) != expected:
            raise RuntimeError("the node accepted another model")
        for layer in self._layers.values():
            kept, wanted = self._groups[layer.group].window, accept.windows[layer.number]
            if kept and kept != wanted:
                raise RuntimeError(f"layer {layer.number} keeps {kept} tokens here, and {wanted or 'all'} on the node")
        self._windows = accept.windows
        old, self._shared = self._shared, None
        if old:
            self._stream.synchronize()
            old.close()
        self._shared = SharedTensor(memory, self._stream.device)

    def _table(self, layer: Layer) -> tuple[int, int]:
        return layer.group, self._windows[layer.number]

    def _slots(self, span: Span, group: int, window: int) -> np.ndarray:
        about = self._groups[group]
        before = first_row(about.window, span.start, span.stop) // about.block  # blocks that the span leaves out
        places = np.arange(first_row(window, span.start, span.stop), span.stop)
        numbers, blocks = places // about.block - before, np.asarray(span.blocks[group], np.int64)
        if numbers[-1] >= len(blocks) or not blocks[numbers].all():  # block 0 is vLLM's empty one
            raise RuntimeError(f"the blocks {span.blocks[group]} do not hold the rows {places[0]} to {span.stop}")
        slots: np.ndarray = blocks[numbers] * about.block + places % about.block
        return slots

    def _export(self, step: _Step, layer: Layer) -> None:
        """Under the lock: a ticket that is released meanwhile gets its answer behind these copies."""
        with self._link.lock, self._stream.beside():
            parts = self._pages.gather(layer.tensor, step.index[self._table(layer)])
            if not step.waiting:
                self._stream.mark_gathered()
            rows, after, window = [], [], self._windows[layer.number]
            for span, part in zip(step.spans, parts, strict=True):
                if (grant := self._link.grants.get(span.ticket)) and self._shared:
                    first = first_row(window, span.start, span.stop)
                    after.append(self._stream.copy(self._target(grant, layer, first, span.stop), part))
                    rows.append(ExportedRows(span.ticket, layer.number, span.start, span.stop))
            if rows:
                self._link.send(Exported(rows=tuple(rows)), _all(self._stream.done(), after))

    def _target(self, grant: Grant, layer: Layer, first: int, stop: int) -> torch.Tensor:
        assert self._shared
        layout, (head, count) = self._layout, layer.heads
        at = grant.offset + layout.rows_at(grant.tokens, layer.number, first)
        shape = (2, stop - first, layout.kv_heads, layout.head_dim)
        return self._shared.view(at, shape, layer.tensor.dtype)[:, :, head : head + count]


def _all(first: Callable[[], None] | None, after: Sequence[Callable[[], None] | None]) -> Callable[[], None] | None:
    """Wait for the device, then do what is left on the host."""
    rest = [each for each in after if each]
    if not rest:
        return first

    def run() -> None:
        if first:
            first()
        for each in rest:
            each()

    return run
