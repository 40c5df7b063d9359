"""Prompts that vLLM computes: each gets memory here and a ticket there; what the connector exports goes into the job's
outbox, from which the KV server sends it, as with any other engine. vLLM's scheduler decides the order."""

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from disaggregated_inference.api import PrefillMetrics
from disaggregated_inference.errors import Cancelled, DisaggError, EngineFailed, EngineUnavailable, NodeBusy
from disaggregated_inference.kv import TicketBook
from disaggregated_inference.kv_transfer import End
from disaggregated_inference.node import ChunkedPrefill, KVMemory, OnPrefillEnd, PrefillJob
from disaggregated_inference.timeouts import VllmBorderTimeouts
from disaggregated_inference.vllm_connector.messages import ExportedRows
from disaggregated_inference.vllm_node.assembly import Assembly
from disaggregated_inference.vllm_node.client import Computed
from disaggregated_inference.vllm_node.connector_server import ConnectorServer
from disaggregated_inference.vllm_node.engine import VllmEngine
from disaggregated_inference.vllm_node.prefill_requests import Completions

log = logging.getLogger(__name__)

_NO_START = "vLLM's scheduler did not report its start"


@dataclass(eq=False, slots=True)
class Running:
    """A prompt inside vLLM, or one whose memory vLLM may still write to."""

    job: PrefillJob
    id: str  # its ticket in vLLM: new and secret, whatever the caller's ticket is
    offset: int
    assembly: Assembly
    requested_at: float
    future: "Future[PrefillMetrics]" = field(default_factory=Future)
    request: "Future[Computed] | None" = None
    begun_at: float = field(default_factory=time.monotonic)
    started_at: float = 0.0
    computed_at: float = 0.0  # by vLLM's answer or by the logits: copies from a GPU may end later
    cached_tokens: int = 0
    has_logits: bool = False
    answered_at: float = 0.0  # when vLLM's HTTP response came
    released: bool = False


class VllmPrefill(ChunkedPrefill):
    """In the place of `ChunkedPrefill`: the same jobs, computed elsewhere. The border's threads call the reports."""

    def __init__(
        self,
        border: ConnectorServer,
        completions: Completions,
        timeouts: VllmBorderTimeouts,
        kv_memory: KVMemory,
        tickets: TicketBook,
        chunk_tokens: int,
        on_end: OnPrefillEnd,
    ) -> None:
        super().__init__(kv_memory, tickets, chunk_tokens, on_end)
        self._border, self._completions, self.timeouts = border, completions, timeouts
        self._lock = threading.RLock()
        self._running: dict[str, Running] = {}  # by id in vLLM
        self.uncounted: dict[str, bool] = {}  # ids whose computed tokens vLLM has not told yet; whether of a peer check
        self._released: deque[tuple[float, str]] = deque()  # when, and ids
        self.on_lost: Callable[[], None] = lambda: None  # vLLM is gone: the next one is another
        self._heard_at = time.monotonic()
        border.reports = self
        kv_memory.every_tick(self._look_for_late)

    @property
    def vllm(self) -> VllmEngine:
        assert isinstance(self.engine, VllmEngine)
        return self.engine

    @property
    def stalled_s(self) -> float:
        """How long vLLM has reported nothing of prompts that it should compute. Its own health check does not see an
        engine that hangs."""
        begun = [each.begun_at for each in list(self._running.values()) if not each.future.done()]
        return max(0.0, time.monotonic() - max(self._heard_at, min(begun))) if begun else 0.0

    def admit(self, job: PrefillJob, wait_s: float) -> None:
        """While vLLM is away, requests go elsewhere at once."""
        if trouble := self._border.trouble():
            raise EngineUnavailable(f"vLLM is not attached: {trouble}")
        super().admit(job, wait_s)

    def compute_canary(self, job: PrefillJob) -> "Future[PrefillMetrics]":
        """Without admission: the prompt of a peer check is short."""
        result: Future[PrefillMetrics] = Future()

        def start() -> None:
            self.open_job(job)
            self.begin(job, time.perf_counter()).add_done_callback(partial(_pass_on, result))

        self.scheduler.post(start).add_done_callback(lambda done: _fail(result, done.exception()))
        return result

    def begin(self, job: PrefillJob, requested_at: float) -> "Future[PrefillMetrics]":
        """vLLM may have gone since the job was admitted: then the job fails, as if it went now."""
        assert job.sequence
        id, tokens = secrets.token_urlsafe(12), len(job.tokens)
        running = Running(job, id, job.sequence.state, Assembly(tokens, ()), requested_at)
        with self._lock:
            try:
                running.assembly = Assembly(tokens, self._border.grant(id, running.offset, tokens).senders)
            except EngineUnavailable as error:
                self._fail(running, error)
                return running.future
            self._running[id] = running
            self.uncounted[id] = not job.ticket
        running.request = self._completions.start(id, job.tokens, job.salt.value)
        running.request.add_done_callback(partial(self._answered, running))
        return running.future

    # What vLLM reports.

    def started(self, ticket: str, cached_tokens: int) -> None:
        """On the scheduler's connection: of a short prompt, the workers' reports may have come before."""
        self._heard_at = time.monotonic()
        with self._lock:
            if running := self._running.get(ticket):
                running.started_at, running.cached_tokens = time.perf_counter(), cached_tokens
                running.job.cached_tokens = cached_tokens
                self._finish_if_complete(running)

    def stepped(self) -> None:
        """Of others' requests, perhaps: then a prompt waits for its turn."""
        self._heard_at = time.monotonic()

    def exported(self, worker: int, rows: ExportedRows) -> None:
        self._heard_at = time.monotonic()
        with self._lock:
            running = self._running.get(rows.ticket)
            if not running or running.future.done():
                return
            try:
                ready = running.assembly.add(worker, rows.layer, rows.start, rows.stop)
            except EngineFailed as error:
                return self._fail(running, error)
            for layer, start, stop in ready:
                self._put(running, layer, start, stop)
            assert running.job.sequence
            running.job.sequence.length = running.assembly.committed
            self._finish_if_complete(running)

    def logits_ready(self, ticket: str) -> None:
        with self._lock:
            running = self._running.get(ticket)
            if running and not running.future.done():
                vllm, tokens = self.vllm, len(running.job.tokens)
                running.job.outbox.put_logits(vllm.staging.logits_at(vllm.region, running.offset, tokens))
                running.has_logits, running.computed_at = True, running.computed_at or time.perf_counter()
                self._finish_if_complete(running)

    def failed(self, ticket: str, reason: str) -> None:
        if running := self._running.get(ticket):
            self._fail(running, EngineFailed(f"the connector inside vLLM failed: {reason}"))

    def ended(self, ticket: str, computed_tokens: int, status: str) -> None:
        """Counts what went through the model, also of requests that were cancelled."""
        self._heard_at = time.monotonic()
        self.engine.counters.prompt_tokens += computed_tokens
        if self.uncounted.pop(ticket, False):
            self.canary_tokens += computed_tokens

    def lost(self, reason: str) -> None:
        self.on_lost()
        with self._lock:
            self.uncounted.clear()
            for running in list(self._running.values()):
                self._fail(running, EngineFailed(reason))

    # How a prompt ends.

    def _put(self, running: Running, layer: int, start: int, stop: int) -> None:
        vllm, tokens = self.vllm, len(running.job.tokens)
        first = vllm.spec.layout.layers[layer].first_row(start, stop)
        piece = vllm.staging.slice_at(vllm.region, vllm.dtype, running.offset, tokens, layer, first, stop)
        running.job.outbox.put(piece)

    def _finish_if_complete(self, running: Running) -> None:
        if not (running.assembly.complete and running.has_logits and running.started_at) or running.future.done():
            return
        job, count, cached = running.job, len(running.job.tokens), running.cached_tokens
        started = running.started_at if running.started_at < running.computed_at else running.requested_at
        seconds, queue_s = running.computed_at - started, started - running.requested_at
        metrics = PrefillMetrics(count, seconds, (count - cached) / seconds, queue_s, cached)
        self.rates.record(count - cached, count - cached, seconds)
        job.outbox.finish(End(prompt_tokens=count, queue_s=queue_s, prefill_s=seconds, cached_tokens=cached))
        with suppress(InvalidStateError):
            running.future.set_result(metrics)
        self.tickets.hold(job.ticket)

    def _fail(self, running: Running, error: DisaggError) -> None:
        """The first call counts."""
        running.job.outbox.fail(error)
        with suppress(InvalidStateError):
            running.future.set_exception(error)
        self.tickets.hold(running.job.ticket)
        self.close_soon(running.job)

    def _answered(self, running: Running, done: "Future[Computed]") -> None:
        """vLLM's HTTP response. The KV may still be on its way: copies from a GPU end after the computing."""
        running.answered_at, running.computed_at = time.monotonic(), running.computed_at or time.perf_counter()
        with self._lock:  # a prompt that is complete needs no answer
            if not running.future.done() and (error := _problem(done)):
                self._fail(running, error)

    def _look_for_late(self) -> None:
        """vLLM tells the end of a released ticket soon, or never had its request."""
        late = time.monotonic() - self.timeouts.export_s
        self._fail_incomplete(late)
        while self._released and self._released[0][0] < late:
            self.uncounted.pop(self._released.popleft()[1], None)

    def _fail_incomplete(self, late: float) -> None:
        """A prompt of which vLLM believes that it is done, and of which rows are missing, must never stay silent."""
        for running in list(self._running.values()):
            if 0 < running.answered_at < late and not running.future.done():
                rest = "the logits are missing" if not running.has_logits else _NO_START
                what = running.assembly.missing() if not running.assembly.complete else rest
                self._fail(running, EngineFailed(f"vLLM computed the prompt, but its KV is not complete: {what}"))

    def close_job(self, job: PrefillJob) -> None:
        """On the scheduler's thread. The memory is free when vLLM's workers say that they write no more."""
        running = next((each for each in list(self._running.values()) if each.job is job), None)
        if not running:
            return super().close_job(job)
        if job.outbox.readers or running.released:
            return
        running.released = True
        if running.request and not (running.assembly.complete and running.has_logits):
            running.request.cancel()
        with self._lock:  # it may be about to end well
            if not running.future.done():
                self._fail(running, Cancelled("the prefill was cancelled"))
        self._border.release(running.id, lambda: self._forget(running))

    def _forget(self, running: Running) -> None:
        with self._lock:
            self._running.pop(running.id, None)
        self._released.append((time.monotonic(), running.id))
        with suppress(NodeBusy):  # the engine has stopped: there is no memory to free
            self.scheduler.post(lambda: super(VllmPrefill, self).close_job(running.job))


def _problem(answer: "Future[Computed]") -> DisaggError | None:
    """Why vLLM will not compute the rest of a prompt."""
    if answer.cancelled():
        return Cancelled("the prefill was cancelled")
    if error := answer.exception():
        return error if isinstance(error, DisaggError) else EngineFailed(f"the request to vLLM failed: {error}")
    return EngineFailed("vLLM aborted the request") if answer.result().aborted else None


def _pass_on(result: "Future[PrefillMetrics]", done: "Future[PrefillMetrics]") -> None:
    with suppress(InvalidStateError):
        if error := done.exception():
            result.set_exception(error)
        else:
            result.set_result(done.result())


def _fail(result: "Future[PrefillMetrics]", error: BaseException | None) -> None:
    if error:
        with suppress(InvalidStateError):
            result.set_exception(error)
