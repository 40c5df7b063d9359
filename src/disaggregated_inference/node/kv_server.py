"""Serves the KV connections of a prefill node: checks the ticket, sends the outbox, ends the ticket after the fetch."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress

import msgspec

from disaggregated_inference.api import KVSecurity, PrefillMetrics
from disaggregated_inference.errors import Cancelled, DisaggError, NodeRestarted, ProtocolError, TicketRefused
from disaggregated_inference.kv import TicketBook
from disaggregated_inference.kv_transfer import (
    CODECS,
    KEYED_MAGIC,
    MAGIC,
    MIN_PART_BYTES,
    Address,
    Connection,
    Hello,
    Outbox,
    TlsSocket,
    Welcome,
    peek,
    serve,
    start_tls,
)
from disaggregated_inference.node.chunked_prefill import ChunkedPrefill
from disaggregated_inference.node.context import prompt_hash
from disaggregated_inference.node.kv_listener import KVListener
from disaggregated_inference.node.peer_check import canary_prompt
from disaggregated_inference.node.prefill_job import PrefillJob
from disaggregated_inference.node.trust import Trust
from disaggregated_inference.timeouts import NodeTimeouts

log = logging.getLogger(__name__)

_MAX_CONNECTIONS = 1024


class UnadmittedLog:
    """Connections that ended before their HELLO was accepted. Anyone can make them: they get few lines."""

    def __init__(self, every_s: float) -> None:
        self._every_s, self._next_at, self._count = every_s, 0.0, 0
        self._lock = threading.Lock()

    def add(self, error: DisaggError) -> None:
        with self._lock:
            self._count += 1
            if (now := time.monotonic()) < self._next_at:
                return
            count, self._count, self._next_at = self._count, 0, now + self._every_s
        message = "KV connections ended before they were admitted (%d since the last such line): %s"
        log.warning(message, count, error, extra={"code": error.code})


class KVServer:
    """`find_job` returns the job of a ticket, or raises `TicketRefused`."""

    def __init__(
        self,
        addresses: Sequence[Address],
        epoch: str,
        tickets: TicketBook,
        prefill: ChunkedPrefill,
        find_job: Callable[[str], PrefillJob],
        timeouts: NodeTimeouts,
        trust: Trust = Trust(),
        min_part_bytes: int = MIN_PART_BYTES,
    ) -> None:
        self.min_part_bytes = min_part_bytes
        self.epoch, self._tickets, self._prefill, self._find_job = epoch, tickets, prefill, find_job
        self._timeouts, self._trust = timeouts, trust
        self.canary: Outbox | None = None
        self._unadmitted = UnadmittedLog(timeouts.transfer.log_unadmitted_s)
        self.listener = KVListener(addresses, self._serve, _MAX_CONNECTIONS, timeouts)

    def welcome(self, job: PrefillJob, codec: str) -> Welcome:
        engine, count = self._prefill.engine, len(job.tokens)
        windowed = any(plan.window for plan in engine.spec.layout.layers)  # a cached prefix comes in one piece there
        return Welcome(
            epoch=self.epoch,
            prompt_tokens=count,
            dtype=engine.dtype,
            codec=codec,
            chunk_tokens=count if windowed else min(self._prefill.chunk_tokens, count),
            lease_s=self._tickets.lease_s,
            rounding=engine.fingerprint.weights.rounding,
        )

    def compute_canary(self) -> PrefillJob:
        """Compute the prompt of the peer check and keep its KV: later there may be no memory for it."""
        job = self._canary_job()
        self._start_canary(job).exception()
        return job

    def _serve(self, sock: socket.socket) -> None:
        """One connection. A decode node that vanished may come back and resume; one that cancelled may not."""
        sock.settimeout(self._timeouts.fetch_silence_s)
        served: list[tuple[Hello, PrefillJob]] = []

        def admit(hello: Hello) -> tuple[Welcome, Outbox]:
            if isinstance(secured, TlsSocket):
                self._trust.require_fetcher(secured.peer_certificate)
            self._require_mode(hello, mode)
            job = self._admit(hello)
            self.listener.admitted(sock)
            served.append((hello, job))
            codec = next((name for name in hello.codecs if name in CODECS), "raw")
            return self.welcome(job, codec), job.outbox

        try:
            mode = self._mode_of(sock)
            secured = self._secured(sock, mode)
            secret_of = self._tickets.secret_of if mode == "authenticated" else None
            connection = Connection(secured, self._timeouts.transfer)
            end = serve(
                connection, admit, lambda: self._tickets.renew(served[0][0].ticket), secret_of, self.min_part_bytes
            )
            if end:
                self._finish_stream(*served[0])
        except TicketRefused as error:  # info only: often a client that left
            log.info("a fetch was refused: %s", error, extra=_log_fields(served) | {"code": error.code})
        except Cancelled as error:
            self._tickets.cancel(served[0][0].ticket)
            log.info("a fetch was cancelled: %s", error, extra=_log_fields(served))
        except DisaggError as error:
            if served:
                log.warning("a fetch failed: %s", error, extra=_log_fields(served) | {"code": error.code})
            else:
                self._unadmitted.add(error)
        finally:
            if served and served[0][0].canary:
                self._prefill.cancel(served[0][1])

    def _mode_of(self, sock: socket.socket) -> KVSecurity:
        """As the first bytes say, where this node offers several."""
        offered = self._trust.offered
        if len(offered) == 1:
            return offered[0]
        begin = peek(sock, self._timeouts.transfer.hello_s)
        spoken = "authenticated" if begin == KEYED_MAGIC else "plain" if begin == MAGIC else "tls"
        return next((mode for mode in offered if mode == spoken), offered[0])

    def _require_mode(self, hello: Hello, mode: KVSecurity) -> None:
        """The ticket's own: what one link may do is no weakness of another."""
        with suppress(TicketRefused):  # an unknown ticket is refused with the rest
            job = self._find_job(hello.ticket)
            if job.security != mode:
                raise ProtocolError(f"the KV of this ticket goes over {job.security} connections, not {mode}")

    def _secured(self, sock: socket.socket, mode: KVSecurity) -> socket.socket | TlsSocket:
        """On the connection's own thread: a peer that stalls in its handshake holds no other up."""
        if mode != "tls" or not self._trust.identity:
            return sock
        return start_tls(sock, self._trust.identity.server_context, self._timeouts.transfer.handshake_s, server=True)

    def _admit(self, hello: Hello) -> PrefillJob:
        if hello.epoch not in ("", self.epoch):
            raise NodeRestarted("this ticket is from another node, or from before this node was restarted")
        if hello.canary:
            return self._serve_canary(hello)
        job = (self._renew if hello.renew_only else self._redeem)(hello)
        if hello.prompt_hash not in ("", prompt_hash(job.tokens)):
            raise TicketRefused("the request's tokens are not the prompt of this ticket")
        if hello.prompt_logprobs not in (msgspec.UNSET, job.outbox.prompt_logprobs):
            raise TicketRefused("give /prefill the same prompt_logprobs as /decode: they are computed with the KV")
        return job

    def _redeem(self, hello: Hello) -> PrefillJob:
        self._tickets.redeem(hello.ticket, hello.secret, hello.fetch, hello.fingerprint)
        return self._find_job(hello.ticket)

    def _renew(self, hello: Hello) -> PrefillJob:
        """The ticket stays unused: if this request gets no memory, another one may fetch the KV."""
        self._tickets.check(hello.ticket, hello.secret, hello.fetch, hello.fingerprint)
        self._tickets.renew(hello.ticket)
        job = self._find_job(hello.ticket)
        with job.outbox.reading():  # raises the error of a failed prefill
            return job

    def _serve_canary(self, hello: Hello) -> PrefillJob:
        """A job for this connection alone."""
        self._tickets.check(hello.ticket, hello.secret, hello.fetch, hello.fingerprint)
        job = self._canary_job()
        if self.canary:
            job.outbox = self.canary.copy()
        else:
            self._start_canary(job)
        return job

    def _canary_job(self) -> PrefillJob:
        return PrefillJob(canary_prompt(self._prefill.engine.spec.vocabulary))

    def _start_canary(self, job: PrefillJob) -> "Future[PrefillMetrics]":
        def keep(_: object) -> None:
            """On the scheduler's thread, before the rows are freed."""
            if job.outbox.complete:
                self.canary = job.outbox.copy()

        computing = self._prefill.compute_canary(job)
        computing.add_done_callback(keep)
        return computing

    def _finish_stream(self, hello: Hello, job: PrefillJob) -> None:
        job.streams_done.add(hello.stream)
        if not hello.canary and len(job.streams_done) == hello.streams:
            self._tickets.fetched(hello.ticket)


def _log_fields(served: list[tuple[Hello, PrefillJob]]) -> dict[str, str]:
    return {"ticket": served[0][0].ticket, "request_id": served[0][0].request_id[:100]} if served else {}
