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
from disaggregated_inference.errors import Cancelled, ContextTooLong, DisaggError, PeerGone, TicketRefused
from disaggregated_inference.kv.tickets import Ticket, TicketBook
from disaggregated_inference.nodes.context import Context
from disaggregated_inference.nodes.worker import EngineThread, Work
from disaggregated_inference.wire import End, Hello, Outbox, Welcome, serve
from disaggregated_inference.wire.codecs import CODECS
from disaggregated_inference.wire.frames import Connection

log = logging.getLogger(__name__)

_SILENCE_S = 15.0  # three lease renewals that never came


class PrefillMetrics(msgspec.Struct, frozen=True):
    prompt_tokens: int
    prefill_time: float
    prefill_speed: float
    queue_time: float


@dataclass(slots=True)
class Attempt:
    """One prompt being read, or read and waiting to be fetched."""

    tokens: list[int]
    outbox: Outbox = field(default_factory=Outbox)
    sequence: Sequence | None = None
    ended: bool = False
    streams_done: set[int] = field(default_factory=set)


class PrefillNode:
    """Owns the engine's thread, the tickets and the KV listener."""

    def __init__(
        self, worker: EngineThread, kv_host: str, kv_port: int, chunk_tokens: int = 2048, lease_s: float = 30.0
    ) -> None:
        self.worker, self.engine = worker, worker.engine
        self.epoch = secrets.token_hex(8)
        self.chunk_tokens = chunk_tokens
        self.book = TicketBook(lease_s=lease_s)
        self._attempts: dict[str, Attempt] = {}
        self._listener = socket.create_server((kv_host, kv_port))
        self._listener.settimeout(0.5)  # how long closing may go unnoticed where a shutdown does not wake an accept
        self.kv_address = (kv_host, self._listener.getsockname()[1])
        self._closing = threading.Event()
        for task in (self._accept, self._sweep):
            threading.Thread(target=task, name=f"kv-{task.__name__.strip('_')}", daemon=True).start()

    def begin(self, tokens: Items[int], ticket_id: str | None = None) -> "tuple[Context, Future[PrefillMetrics]]":
        """Take a prompt: the context can be fetched from at once, the future ends with the prefill."""
        window = self.engine.spec.context_window
        if not 0 < len(tokens) <= window:
            raise ContextTooLong(len(tokens), window)
        attempt = Attempt(list(tokens))
        ticket = self.book.issue(self.engine.fingerprint, lambda: self._release(ticket_ref[0]), ticket_id)
        ticket_ref = [ticket]
        self._attempts[ticket.id] = attempt
        try:
            future = self.worker.start(self._read(attempt, time.perf_counter()))
        except DisaggError:
            self.book.cancel(ticket.id)
            raise
        host, port = self.kv_address
        return Context(ticket=ticket.id, secret=ticket.secret, tokens=len(tokens), addresses=((host, port),)), future

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
            if attempt.ended:  # released while we were reading: nobody else will close it
                self._close(attempt)
        count = len(attempt.tokens)
        return PrefillMetrics(count, seconds, count / seconds, started - asked)

    def _release(self, ticket: Ticket) -> None:
        """The ticket ended. Rows go back on the engine's thread, after whatever chunk it is at."""
        attempt = self._attempts.pop(ticket.id, None)
        if attempt:
            attempt.ended = True
            attempt.outbox.fail(TicketRefused("the ticket expired or was cancelled"))
            threading.Thread(target=self.worker.call, args=(lambda: self._close(attempt),), daemon=True).start()

    def _close(self, attempt: Attempt) -> None:
        if attempt.sequence:
            self.engine.close(attempt.sequence)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            sock.settimeout(_SILENCE_S)
            threading.Thread(target=self._serve, args=(sock,), name="kv-send", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        """One fetching connection. A receiver that vanished may come back; one that cancelled will not."""
        hellos: list[Hello] = []

        def admit(hello: Hello) -> tuple[Welcome, Outbox]:
            self.book.redeem(hello.ticket, hello.secret, hello.fetch, hello.fingerprint)
            attempt = self._attempts.get(hello.ticket)
            if attempt is None:
                raise TicketRefused("the ticket expired or was cancelled")
            hellos.append(hello)
            codec = next((name for name in hello.codecs if name in CODECS), "raw")
            count = len(attempt.tokens)
            rows = min(self.chunk_tokens, count)
            return Welcome(
                epoch=self.epoch, prompt_tokens=count, dtype=self.engine.dtype, codec=codec, chunk_tokens=rows
            ), attempt.outbox

        try:
            serve(Connection(sock), admit, lambda: self.book.renew(hellos[0].ticket))
            self._stream_done(hellos[0])
        except Cancelled:
            self.book.cancel(hellos[0].ticket)
        except (PeerGone, DisaggError) as error:
            log.warning("a fetch ended early: %s", error)

    def _stream_done(self, hello: Hello) -> None:
        attempt = self._attempts.get(hello.ticket)
        if attempt:
            attempt.streams_done.add(hello.stream)
            if len(attempt.streams_done) == hello.streams:
                self.book.fetched(hello.ticket)

    def _sweep(self) -> None:
        while not self._closing.wait(min(1.0, self.book.lease_s / 4)):
            self.book.sweep()

    def close(self) -> None:
        self._closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
