"""The prefill node: computes the KV of prompts and holds it under a ticket until it was fetched or its lease ends."""

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from msgspec import UNSET, UnsetType

from disaggregated_inference.api import KVSecurity, PrefillMetrics
from disaggregated_inference.engines import Engine
from disaggregated_inference.errors import BadRequest, ContextTooLong, DeadlineExceeded, DisaggError, TicketRefused
from disaggregated_inference.kv import NO_SALT, Salt, TicketBook
from disaggregated_inference.kv_transfer import MIN_PART_BYTES, Address, Outbox, encode_inline
from disaggregated_inference.node.chunked_prefill import ChunkedPrefill, OnPrefillEnd
from disaggregated_inference.node.context import PrefillContext, prompt_hash
from disaggregated_inference.node.kv_memory import KVMemory
from disaggregated_inference.node.kv_server import KVServer
from disaggregated_inference.node.prefill_job import PrefillJob
from disaggregated_inference.node.trust import Trust
from disaggregated_inference.timeouts import NodeTimeouts


class PrefillNode:
    """The prefill role of a node: `ChunkedPrefill` computes, `KVServer` sends. `on_end` is called at the end of every
    prefill. An engine with a scheduler of its own brings its `chunked_prefill`."""

    def __init__(
        self,
        kv_memory: KVMemory,
        kv_addresses: Sequence[Address] = (("127.0.0.1", 0),),
        chunk_tokens: int = 0,
        lease_s: float = 30.0,
        timeouts: NodeTimeouts = NodeTimeouts(),
        trust: Trust = Trust(),
        chunked_prefill: Callable[[KVMemory, TicketBook, int, OnPrefillEnd], ChunkedPrefill] = ChunkedPrefill,
        min_part_bytes: int = MIN_PART_BYTES,
    ) -> None:
        self.kv_memory, self.scheduler, self.trust = kv_memory, kv_memory.scheduler, trust
        self._timeouts = timeouts
        self.on_end: Callable[[PrefillMetrics | None, BaseException | None], None] = lambda metrics, error: None
        self.tickets = TicketBook(lease_s=lease_s, timeouts=timeouts.kv)
        self.jobs: dict[str, PrefillJob] = {}
        chunk = chunk_tokens or self.engine.chunk_tokens
        self.chunked_prefill = chunked_prefill(kv_memory, self.tickets, chunk, lambda *ended: self.on_end(*ended))
        self.epoch = secrets.token_hex(8)
        self.kv_server = KVServer(
            kv_addresses,
            self.epoch,
            self.tickets,
            self.chunked_prefill,
            self._find_job,
            timeouts,
            trust,
            min_part_bytes,
        )
        self.kv_addresses = self.kv_server.listener.addresses
        self._closing = threading.Event()
        threading.Thread(target=self._sweep, name="kv-sweep", daemon=True).start()

    @property
    def engine(self) -> Engine:
        return self.scheduler.engine

    @property
    def open_requests(self) -> int:
        """Prompts that wait or are being computed."""
        return sum(not job.future.done() for job in list(self.jobs.values()))

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens that are not computed yet."""
        return sum(job.waiting_tokens for job in list(self.jobs.values()) if not job.future.done())

    def submit(
        self,
        tokens: Sequence[int],
        ticket_id: str | None = None,
        host: str = "",
        wait_s: float = 30.0,
        timeout_s: float = 60.0,
        prompt_logprobs: int | None = None,
        scored_tokens: int = 0,
        salt: Salt = NO_SALT,
        security: KVSecurity | UnsetType = UNSET,
    ) -> "tuple[PrefillContext, Future[PrefillMetrics]]":
        """Start a prefill. The KV can be fetched with the context at once; the future ends with the prefill. `host` is
        where the client reached this node; it replaces wildcard KV addresses. `wait_s` limits the wait for memory,
        `timeout_s` the whole prefill; `security` is that of the link that the KV takes."""
        self._require_valid(tokens, wait_s, timeout_s)
        mode = self.trust.mode_of(security)
        deadline, scored = time.monotonic() + timeout_s, None
        if prompt_logprobs is not None:
            self.engine.require_prompt_logprobs()
            scored = scored_tokens
        outbox = Outbox(tokens, prompt_logprobs)
        job = PrefillJob(list(tokens), ticket_id or secrets.token_urlsafe(16), outbox, deadline, salt, mode, scored)
        ticket = self.tickets.issue(self.engine.fingerprint, lambda: self._end(job), job.ticket)
        self.jobs[ticket.id] = job
        job.outbox.on_released = lambda: self.chunked_prefill.close_soon(job)
        try:
            self.chunked_prefill.admit(job, wait_s)
        except DisaggError:
            job.future.cancel()  # so that `on_end` is not called: the caller counts the refusal
            self.tickets.cancel(ticket.id)
            raise
        if job.ended:  # cancelled before it was in `jobs`
            self.jobs.pop(ticket.id, None)
        context = PrefillContext(
            ticket=ticket.id,
            secret=ticket.secret,
            epoch=self.epoch,
            tokens=len(tokens),
            prompt_hash=prompt_hash(tokens),
            addresses=self.kv_server.listener.addresses_for(host),
            signer=self.trust.identity.name if self.trust.identity else "",
            security=mode,
        )
        return context, job.future

    def _require_valid(self, tokens: Sequence[int], wait_s: float, timeout_s: float) -> None:
        self.kv_memory.require_open()
        window = self.engine.spec.context_window
        if not len(tokens):
            raise BadRequest("the prompt is empty")
        if len(tokens) > window:
            raise ContextTooLong(len(tokens), window, prompt_tokens=len(tokens))
        self.engine.require_vocabulary(tokens)
        if not 0 < timeout_s <= 86400 or not 0 <= wait_s <= 86400:
            raise BadRequest("timeout_s and queue_s are seconds, up to 86400 (a day)")

    def admitted(self, ticket: str) -> "Future[None]":
        """Done when there is memory for the prompt, or an error."""
        return self._find_job(ticket).admitted

    def inline(self, ticket: str, limit_bytes: int) -> bytes:
        """The whole KV of a computed prompt as bytes. The ticket stays valid."""
        job = self._find_job(ticket)
        with job.outbox.reading():
            return encode_inline(self.engine.fingerprint, self.kv_server.welcome(job, "raw"), job.outbox, limit_bytes)

    def compute_canary(self) -> None:
        """Before the first peer check."""
        job = self.kv_server.compute_canary()
        self.scheduler.call(lambda: self.chunked_prefill.cancel(job))

    def _find_job(self, ticket: str) -> PrefillJob:
        if (job := self.jobs.get(ticket)) is None:
            raise TicketRefused("the ticket expired or was cancelled")
        return job

    def _end(self, job: PrefillJob) -> None:
        """The ticket ended."""
        self.jobs.pop(job.ticket, None)
        self.chunked_prefill.cancel(job)

    def _sweep(self) -> None:
        while not self._closing.wait(min(1.0, self.tickets.lease_s / 4)):
            self.tickets.sweep()
            self._cancel_late()

    def _cancel_late(self) -> None:
        for job in list(self.jobs.values()):
            if job.deadline < time.monotonic() and not job.future.done():
                error = DeadlineExceeded(
                    "the prefill was not finished in time; send a shorter prompt or raise timeout_s"
                )
                job.outbox.fail(error)
                self.chunked_prefill.finish(job, error)
                job.set_admitted(error)
                self.tickets.cancel(job.ticket)

    def close(self, drain_s: float = 0.0) -> None:
        """Let prefills finish and KV be fetched for `drain_s` seconds, then cancel what is left."""
        deadline = time.monotonic() + drain_s
        while len(self.tickets) and time.monotonic() < deadline:
            time.sleep(self._timeouts.drain_poll_s)
        self.kv_server.listener.drain(deadline - time.monotonic())
        self._closing.set()
        self.chunked_prefill.prefix_writer.stop()
        self.kv_server.listener.close()
        for job in list(self.jobs.values()):
            self.tickets.cancel(job.ticket)
