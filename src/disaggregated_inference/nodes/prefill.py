"""The prefill node: reads prompts and holds their KV, under a ticket, until it was fetched or its lease is over."""

import logging
import secrets
import socket
import threading
import time
from collections.abc import Sequence as Items
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import numpy as np

from disaggregated_inference.engines import Sequence, chunks
from disaggregated_inference.errors import BadRequest, Cancelled, ContextTooLong, DisaggError, NodeBusy, TicketRefused
from disaggregated_inference.kv.tickets import TicketBook
from disaggregated_inference.nodes.canary import canary_tokens
from disaggregated_inference.nodes.context import Context
from disaggregated_inference.nodes.listen import Listener
from disaggregated_inference.nodes.worker import EngineThread, Work
from disaggregated_inference.wire import End, Hello, Outbox, Welcome, serve, tape
from disaggregated_inference.wire.codecs import CODECS
from disaggregated_inference.wire.frames import Connection
from disaggregated_inference.wire.paths import Address

log = logging.getLogger(__name__)

_SILENCE_S = 15.0  # three lease renewals that never came
_MOST_CONNECTIONS = 1024


class PrefillMetrics(msgspec.Struct, frozen=True):
    prompt_tokens: int
    prefill_time: float
    prefill_speed: float
    queue_time: float


@dataclass(slots=True)
class Attempt:
    """One prompt being read, or read and waiting to be fetched."""

    tokens: list[int]
    ticket: str = ""
    outbox: Outbox = field(default_factory=Outbox)
    sequence: Sequence | None = None
    ended: bool = False
    streams_done: set[int] = field(default_factory=set)


class PrefillNode:
    """Owns the engine's thread, the tickets and the KV listeners."""

    def __init__(
        self,
        worker: EngineThread,
        kv_addresses: Items[Address] = (("127.0.0.1", 0),),
        chunk_tokens: int = 0,
        lease_s: float = 30.0,
    ) -> None:
        self.worker, self.engine = worker, worker.engine
        self.epoch = secrets.token_hex(8)
        self.chunk_tokens = chunk_tokens or self.engine.chunk_tokens
        self.book = TicketBook(lease_s=lease_s)
        self._attempts: dict[str, Attempt] = {}
        self._listener = Listener(kv_addresses, self._serve, _MOST_CONNECTIONS)
        self._closing = threading.Event()
        threading.Thread(target=self._sweep, name="kv-sweep", daemon=True).start()

    @property
    def kv_addresses(self) -> tuple[Address, ...]:
        return self._listener.addresses

    def begin(
        self, tokens: Items[int], ticket_id: str | None = None, reached_at: str = ""
    ) -> "tuple[Context, Future[PrefillMetrics]]":
        """Take a prompt: the context can be fetched from at once, the future ends with the prefill. `reached_at` is the
        address the asker used: what a node that listens everywhere hands out as its own."""
        window = self.engine.spec.context_window
        if not len(tokens):
            raise BadRequest("the prompt is empty")
        if len(tokens) > window:
            raise ContextTooLong(len(tokens), window)
        self.engine.require_vocabulary(tokens)
        attempt = Attempt(list(tokens), ticket=ticket_id or secrets.token_urlsafe(16))
        ticket = self.book.issue(self.engine.fingerprint, lambda: self._end(attempt), attempt.ticket)
        self._attempts[ticket.id] = attempt
        try:
            future = self.worker.start(self._read(attempt, time.perf_counter()))
        except DisaggError:
            self.book.cancel(ticket.id)
            raise
        if attempt.ended:  # cancelled before it was known here
            self._attempts.pop(ticket.id, None)
        context = Context(
            ticket=ticket.id,
            secret=ticket.secret,
            epoch=self.epoch,
            tokens=len(tokens),
            addresses=self._listener.reached_at(reached_at),
        )
        return context, future

    def inline(self, ticket: str, limit_bytes: int) -> bytes:
        """The whole cache of a prompt that was read, as one tape. The ticket stays good."""
        attempt = self._attempts.get(ticket)
        if attempt is None:
            raise TicketRefused("the ticket expired or was cancelled")
        return tape.record(self.engine.fingerprint, self._welcome(attempt, "raw"), attempt.outbox, limit_bytes)

    def _read(self, attempt: Attempt, asked: float) -> Work[PrefillMetrics]:
        started = time.perf_counter()
        try:
            if attempt.ended:
                raise Cancelled("cancelled before the prompt was read")
            attempt.sequence = self.engine.open(len(attempt.tokens))
            for part in chunks(attempt.tokens, self.chunk_tokens):
                if attempt.ended:
                    raise Cancelled("cancelled while the prompt was being read")
                logits = self.engine.prefill(attempt.sequence, part, attempt.outbox.put)
                yield
            attempt.outbox.put_logits(np.ascontiguousarray(logits.numpy()[0]))
            seconds = time.perf_counter() - started
            end = End(prompt_tokens=len(attempt.tokens), queue_s=started - asked, prefill_s=seconds)
            attempt.outbox.finish(end)
        except DisaggError as error:
            attempt.outbox.fail(error)
            raise
        except Exception as error:
            attempt.outbox.fail(DisaggError(f"the prefill failed: {error}"))
            raise
        finally:
            self.book.hold(attempt.ticket)
            if attempt.ended or attempt.outbox.failed:  # there is nothing to hold, and nobody else will close it
                self._close(attempt)
        count = len(attempt.tokens)
        return PrefillMetrics(count, seconds, count / seconds, started - asked)

    def _end(self, attempt: Attempt) -> None:
        """The ticket ended. Rows go back on the engine's thread, after whatever chunk it is at."""
        self._attempts.pop(attempt.ticket, None)
        attempt.ended = True
        attempt.outbox.fail(TicketRefused("the ticket expired or was cancelled"))
        with suppress(NodeBusy):  # the engine has stopped, and its memory is gone with it
            self.worker.post(lambda: self._close(attempt))

    def _close(self, attempt: Attempt) -> None:
        if attempt.sequence:
            self.engine.close(attempt.sequence)

    def _welcome(self, attempt: Attempt, codec: str) -> Welcome:
        count = len(attempt.tokens)
        rows = min(self.chunk_tokens, count)
        return Welcome(
            epoch=self.epoch,
            prompt_tokens=count,
            dtype=self.engine.dtype,
            codec=codec,
            chunk_tokens=rows,
            lease_s=self.book.lease_s,
        )

    def _serve(self, sock: socket.socket) -> None:
        """One fetching connection. A receiver that vanished may come back; one that cancelled will not."""
        sock.settimeout(_SILENCE_S)
        served: list[tuple[Hello, Attempt]] = []

        def admit(hello: Hello) -> tuple[Welcome, Outbox]:
            if hello.epoch not in ("", self.epoch):
                raise TicketRefused("this node has restarted since it gave out the ticket: its cache is gone")
            attempt = self._canary(hello) if hello.canary else self._redeem(hello)
            served.append((hello, attempt))
            codec = next((name for name in hello.codecs if name in CODECS), "raw")
            return self._welcome(attempt, codec), attempt.outbox

        try:
            serve(Connection(sock), admit, lambda: self.book.renew(served[0][0].ticket))
            self._stream_done(*served[0])
        except Cancelled as error:
            self.book.cancel(served[0][0].ticket)
            log.info("a fetch was cancelled: %s", error, extra=_about(served))
        except DisaggError as error:
            log.warning("a fetch ended early: %s", error, extra=_about(served) | {"code": error.code})
        finally:
            if served and served[0][0].canary:
                self._end(served[0][1])

    def _redeem(self, hello: Hello) -> Attempt:
        self.book.redeem(hello.ticket, hello.secret, hello.fetch, hello.fingerprint)
        attempt = self._attempts.get(hello.ticket)
        if attempt is None:
            raise TicketRefused("the ticket expired or was cancelled")
        return attempt

    def _canary(self, hello: Hello) -> Attempt:
        """The canary prompt, read for this connection alone."""
        self.book.check(hello.ticket, hello.secret, hello.fetch, hello.fingerprint)
        attempt = Attempt(canary_tokens(self.engine.spec.vocabulary))
        reading = self.worker.start(self._read(attempt, time.perf_counter()), urgent=True)
        reading.add_done_callback(lambda done: done.exception())  # the outbox tells
        return attempt

    def _stream_done(self, hello: Hello, attempt: Attempt) -> None:
        attempt.streams_done.add(hello.stream)
        if not hello.canary and len(attempt.streams_done) == hello.streams:
            self.book.fetched(hello.ticket)

    def _sweep(self) -> None:
        while not self._closing.wait(min(1.0, self.book.lease_s / 4)):
            self.book.sweep()

    @property
    def healthy(self) -> bool:
        return self.worker.alive and self._listener.alive

    def close(self, drain_s: float = 0.0) -> None:
        """Let the transfers that are under way end, for so long; what is still being read is not read to its end."""
        self._listener.drain(drain_s)
        self._closing.set()
        self._listener.close()
        for attempt in list(self._attempts.values()):
            self.book.cancel(attempt.ticket)


def _about(served: list[tuple[Hello, Attempt]]) -> dict[str, str]:
    """For the log; nothing is known of a stranger."""
    return {"ticket": served[0][0].ticket, "request_id": served[0][0].request_id[:100]} if served else {}
