"""Chunked prefill: computes the KV of prompts, one chunk at a time, and puts every chunk into the job's outbox."""

import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

import numpy as np

from disaggregated_inference.api import PrefillMetrics
from disaggregated_inference.engines import Engine, Scoring, chunk_scoring
from disaggregated_inference.errors import Cancelled, DisaggError, KVMemoryFull, NodeBusy, TicketRefused
from disaggregated_inference.kv import TicketBook, reusable_tokens
from disaggregated_inference.kv_transfer import End
from disaggregated_inference.node.admission import Claim
from disaggregated_inference.node.kv_memory import KVMemory
from disaggregated_inference.node.prefill_job import PrefillJob
from disaggregated_inference.node.prefix_writer import PrefixWriter
from disaggregated_inference.node.rates import RateMeter
from disaggregated_inference.node.scheduler import Work

OnPrefillEnd = Callable[[PrefillMetrics | None, BaseException | None], None]


class ChunkedPrefill:
    """Runs a job from admission until its memory is free again."""

    def __init__(self, kv_memory: KVMemory, tickets: TicketBook, chunk_tokens: int, on_end: OnPrefillEnd) -> None:
        self._kv_memory, self.scheduler, self.tickets = kv_memory, kv_memory.scheduler, tickets
        self.chunk_tokens, self._on_end = chunk_tokens, on_end
        self.rates = RateMeter()
        self.canary_tokens = 0  # computed for peer checks
        self.prefix_writer = PrefixWriter(kv_memory, self.close_job)

    @property
    def engine(self) -> Engine:
        return self.scheduler.engine

    def admit(self, job: PrefillJob, wait_s: float) -> None:
        """Compute the prompt when there is memory for it."""
        requested_at = time.perf_counter()

        def start(claim: Claim) -> None:
            job.claim = claim
            if not self.engine.loaded:
                job.set_admitted()  # no memory is in use, and loading takes long: the decode node may load meanwhile
            self.scheduler.post(open_and_compute)

        def open_and_compute() -> None:
            """Admitted is a prompt whose memory is really there. If its context went out earlier, it could get the
            decode memory for which the prompts that hold its own memory are waiting."""
            try:
                if self.open_job(job):
                    job.set_admitted()
                    self.begin(job, requested_at).add_done_callback(lambda done: self._settle(job, done))
            except DisaggError as error:
                refuse(error)
            except Exception as error:
                refuse(DisaggError(f"the prefill cannot start: {error}"))

        def refuse(error: DisaggError) -> None:
            job.outbox.fail(error)
            self.tickets.hold(job.ticket)
            self.finish(job, error)
            self._release(job)
            job.set_admitted(error)

        cost = self.engine.kv_cost(len(job.tokens)) + self.engine.slice_copy_bytes(len(job.tokens))
        job.claim = self._kv_memory.prefill_admission.request(cost, 1, start, refuse, wait_s)
        if job.ended:
            self._release(job)

    def compute_canary(self, job: PrefillJob) -> "Future[PrefillMetrics]":
        """Without admission: the prompt of a peer check is short."""

        def compute() -> Work[PrefillMetrics]:
            self.open_job(job)
            return (yield from self._compute(job, time.perf_counter()))

        return self.scheduler.submit(compute(), urgent=True)

    def cancel(self, job: PrefillJob) -> None:
        """The ticket ended. The scheduler frees the memory after the current chunk."""
        error = TicketRefused("the ticket expired or was cancelled")
        job.ended = True
        job.outbox.fail(error)
        job.set_admitted(error)
        self.finish(job, Cancelled("the prefill was cancelled"))
        self.close_soon(job)

    def finish(self, job: PrefillJob, error: BaseException | None, metrics: PrefillMetrics | None = None) -> None:
        """The first call counts: a prefill may end at the moment at which its ticket is cancelled."""
        with suppress(InvalidStateError):
            job.future.set_exception(error) if error else job.future.set_result(metrics)  # type: ignore[arg-type]
            if job.ticket:
                self._on_end(metrics, error)

    def close_soon(self, job: PrefillJob) -> None:
        with suppress(NodeBusy):  # the engine has stopped: there is no memory to free
            self.scheduler.post(lambda: self.close_job(job))

    def begin(self, job: PrefillJob, requested_at: float) -> "Future[PrefillMetrics]":
        """On the scheduler's thread, with the job's memory open."""
        return self.scheduler.submit(self._compute(job, requested_at))

    def _settle(self, job: PrefillJob, done: "Future[PrefillMetrics]") -> None:
        error = done.exception()
        self.finish(job, error, None if error else done.result())

    def _compute(self, job: PrefillJob, requested_at: float) -> Work[PrefillMetrics]:
        started = time.perf_counter()
        try:
            job.raise_if_cancelled()
            cached = job.cached_tokens = yield from self._reuse_prefix(job)
            yield from self._compute_chunks(job, cached)
            count, seconds = len(job.tokens), time.perf_counter() - started
            speed = (count - cached) / seconds  # of the tokens that this node computed
            metrics = PrefillMetrics(count, seconds, speed, started - requested_at, cached)
            self.finish(job, None, metrics)
            self.prefix_writer.save(job)
            end = End(prompt_tokens=count, queue_s=metrics.queue_time, prefill_s=seconds, cached_tokens=cached)
            job.outbox.finish(end)  # last: a decode node that has everything ends the ticket
        except DisaggError as error:
            job.outbox.fail(error)
            raise
        except Exception as error:
            job.outbox.fail(DisaggError(f"the prefill failed: {error}"))
            raise
        finally:
            self.tickets.hold(job.ticket)
            if job.ended or job.outbox.failed:
                self.close_job(job)
        return metrics

    def open_job(self, job: PrefillJob) -> bool:
        """Open the sequence. False: the free memory is not in one piece, and the job waits again."""
        job.raise_if_cancelled()
        try:
            job.sequence = self._kv_memory.open(len(job.tokens), reserved=job.claim is not None)
            return True
        except KVMemoryFull as error:
            if not job.claim:
                job.outbox.fail(error)
                raise
            self._kv_memory.prefill_admission.requeue(job.claim)
            return False

    def _reuse_prefix(self, job: PrefillJob) -> Work[int]:
        """Place the longest cached prefix."""
        limit = reusable_tokens(len(job.tokens), job.scored_tokens)
        match = self._kv_memory.prefixes.match(job.tokens, limit, job.salt) if job.ticket else None
        if not match or not match.tokens:
            return 0
        assert job.sequence
        for piece in match.slices(self.chunk_tokens):
            job.raise_if_cancelled()
            self.engine.place(job.sequence, piece)
            job.outbox.put(self.engine.placed_view(job.sequence, piece))
            if piece.layer == len(job.sequence.placed) - 1:
                yield
        self.engine.commit(job.sequence, match.tokens)
        return match.tokens

    def _compute_chunks(self, job: PrefillJob, cached: int) -> Work[None]:
        assert job.sequence
        count, new, spent = len(job.tokens), len(job.tokens) - cached, 0.0
        while job.sequence.length < count:
            job.raise_if_cancelled()
            size = self.scheduler.chunk_tokens(self.rates.estimate(new), self.chunk_tokens)
            chunk = job.tokens[job.sequence.length :][:size]
            started = time.perf_counter()
            logits = self.engine.prefill(job.sequence, chunk, job.outbox.put, self._scoring(job, len(chunk)))
            spent += time.perf_counter() - started
            if not job.ticket:
                self.canary_tokens += len(chunk)
            if job.waiting_tokens:  # after the last chunk, the logits go out without a pause
                yield
        job.raise_if_cancelled()  # the rows of a cancelled job may belong to another one
        started = time.perf_counter()
        job.outbox.put_logits(np.ascontiguousarray(logits.numpy()[0]))
        if job.scored_tokens is None:  # scoring takes time that other prompts do not need
            self.rates.record(new, new, spent + time.perf_counter() - started)

    def _scoring(self, job: PrefillJob, count: int) -> Scoring | None:
        outbox, scored = job.outbox, job.scored_tokens
        if scored is None or outbox.prompt_logprobs is None:
            return None
        assert job.sequence
        at = job.sequence.length
        return chunk_scoring(job.tokens, at, count, scored, outbox.prompt_logprobs, outbox.put_logprobs)

    def close_job(self, job: PrefillJob) -> None:
        """On the scheduler's thread."""
        if job.saving or job.outbox.readers:  # the prefix writer or the last reader calls again
            return
        if job.sequence:
            self._kv_memory.close(job.sequence)
        job.outbox.clear()
        self._release(job)

    def _release(self, job: PrefillJob) -> None:
        if job.claim:
            self._kv_memory.prefill_admission.release(job.claim)
