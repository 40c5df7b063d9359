"""The prefill node: reads prompts and holds their KV, under a ticket, until it was fetched or its lease is over."""

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

import numpy as np

from disaggregated_inference.errors import (
    BadRequest,
    Cancelled,
    ContextTooLong,
    DeadlineExceeded,
    DisaggError,
    KVMemoryFull,
    NodeBusy,
    NodeRestarted,
    TicketRefused,
)
from disaggregated_inference.kv.tickets import TicketBook
from disaggregated_inference.kv_transfer import End, Hello, Outbox, Welcome, serve
from disaggregated_inference.kv_transfer.codecs import CODECS
from disaggregated_inference.kv_transfer.frames import Connection
from disaggregated_inference.kv_transfer.inline import record
from disaggregated_inference.kv_transfer.paths import Address
from disaggregated_inference.node.admission import Claim
from disaggregated_inference.node.canary import canary_tokens
from disaggregated_inference.node.context import PrefillContext, prompt_hash
from disaggregated_inference.node.kv_listener import KVListener
from disaggregated_inference.node.kv_memory import KVMemory
from disaggregated_inference.node.prefill_job import PrefillJob, PrefillMetrics
from disaggregated_inference.node.prefix_writer import PrefixWriter
from disaggregated_inference.node.rates import RateMeter
from disaggregated_inference.node.scheduler import Work

log = logging.getLogger(__name__)

_SILENCE_S = 15.0  # three lease renewals that never came
_MOST_CONNECTIONS = 1024


class PrefillNode:
    """Owns the engine's thread, the tickets and the KV listeners."""

    def __init__(
        self,
        kv_memory: KVMemory,
        kv_addresses: Items[Address] = (("127.0.0.1", 0),),
        chunk_tokens: int = 0,
        lease_s: float = 30.0,
    ) -> None:
        self.kv_memory, self.scheduler, self.engine = kv_memory, kv_memory.scheduler, kv_memory.engine
        self.reading = RateMeter()
        self.canary_tokens = 0
        self._canary_read: Outbox | None = None
        self.on_end: Callable[[PrefillMetrics | None, BaseException | None], None] = lambda metrics, error: None
        self.epoch = secrets.token_hex(8)
        self.chunk_tokens = chunk_tokens or self.engine.chunk_tokens
        self.book = TicketBook(lease_s=lease_s)
        self._attempts: dict[str, PrefillJob] = {}
        self._keeper = PrefixWriter(kv_memory, self._close)
        self._listener = KVListener(kv_addresses, self._serve, _MOST_CONNECTIONS)
        self._closing = threading.Event()
        threading.Thread(target=self._sweep, name="kv-sweep", daemon=True).start()

    @property
    def kv_addresses(self) -> tuple[Address, ...]:
        return self._listener.addresses

    def begin(
        self,
        tokens: Items[int],
        ticket_id: str | None = None,
        reached_at: str = "",
        wait_s: float = 30.0,
        timeout_s: float = 60.0,
    ) -> "tuple[PrefillContext, Future[PrefillMetrics]]":
        """Take a prompt: the context can be fetched from at once, the future ends with the prefill. `reached_at` is the
        address the asker used: what a node that listens everywhere hands out as its own. `wait_s` bounds the wait for
        memory, `timeout_s` all of it."""
        self.kv_memory.require_open()
        window = self.engine.spec.context_window
        if not len(tokens):
            raise BadRequest("the prompt is empty")
        if len(tokens) > window:
            raise ContextTooLong(len(tokens), window, prompt_tokens=len(tokens))
        self.engine.require_vocabulary(tokens)
        if not 0 < timeout_s <= 86400 or not 0 <= wait_s <= 86400:
            raise BadRequest("timeout_s and queue_s are seconds, up to a day")
        deadline = time.monotonic() + timeout_s
        attempt = PrefillJob(list(tokens), ticket_id or secrets.token_urlsafe(16), Outbox(tokens), deadline)
        ticket = self.book.issue(self.engine.fingerprint, lambda: self._end(attempt), attempt.ticket)
        self._attempts[ticket.id] = attempt
        attempt.outbox.unread = lambda: self._close_soon(attempt)
        try:
            self._admit(attempt, wait_s)
        except DisaggError:
            attempt.future.cancel()  # who refuses counts it
            self.book.cancel(ticket.id)
            raise
        if attempt.ended:  # cancelled before it was known here
            self._attempts.pop(ticket.id, None)
        context = PrefillContext(
            ticket=ticket.id,
            secret=ticket.secret,
            epoch=self.epoch,
            tokens=len(tokens),
            prompt_hash=prompt_hash(tokens),
            addresses=self._listener.reached_at(reached_at),
        )
        return context, attempt.future

    def admitted(self, ticket: str) -> "Future[None]":
        """Done once there is memory for the prompt, or will be none."""
        return self._known(ticket).admitted

    def inline(self, ticket: str, limit_bytes: int) -> bytes:
        """The whole cache of a prompt that was read, in one piece. The ticket stays good."""
        attempt = self._known(ticket)
        with attempt.outbox.reading():
            return record(self.engine.fingerprint, self._welcome(attempt, "raw"), attempt.outbox, limit_bytes)

    def _known(self, ticket: str) -> PrefillJob:
        if (attempt := self._attempts.get(ticket)) is None:
            raise TicketRefused("the ticket expired or was cancelled")
        return attempt

    def _admit(self, attempt: PrefillJob, wait_s: float) -> None:
        """Read it once there is memory."""
        asked = time.perf_counter()

        def start(claim: Claim) -> None:
            attempt.claim = claim
            try:
                reading = self.scheduler.start(self._read(attempt, asked))
            except DisaggError as error:
                return refuse(error)
            reading.add_done_callback(lambda done: self._settle(attempt, done))
            attempt.was_admitted()

        def refuse(error: DisaggError) -> None:
            attempt.outbox.fail(error)
            self.book.hold(attempt.ticket)
            self._read_over(attempt, error)
            self._release(attempt)
            attempt.was_admitted(error)

        cost = self.engine.kv_cost(len(attempt.tokens)) + self.engine.handed_out_bytes(len(attempt.tokens))
        attempt.claim = self.kv_memory.reading.ask(cost, 1, start, refuse, wait_s)
        if attempt.ended:
            self._release(attempt)

    def _settle(self, attempt: PrefillJob, done: "Future[PrefillMetrics | None]") -> None:
        error = done.exception()
        if error or done.result():  # neither: it waits for memory again
            self._read_over(attempt, error, None if error else done.result())

    def _opened(self, attempt: PrefillJob) -> bool:
        """Memory for the prompt. Where it is there but not in one piece, it waits for others to end."""
        self._require_wanted(attempt)
        try:
            attempt.sequence = self.kv_memory.open(len(attempt.tokens), counted=attempt.claim is not None)
            return True
        except KVMemoryFull as error:
            if not attempt.claim:
                attempt.outbox.fail(error)
                raise
            self.kv_memory.reading.again(attempt.claim)
            return False

    def _read(self, attempt: PrefillJob, asked: float) -> Work[PrefillMetrics | None]:
        started, count, waits = time.perf_counter(), len(attempt.tokens), False
        try:
            if waits := not self._opened(attempt):
                return None
            assert attempt.sequence
            at = attempt.cached_tokens = yield from self._reuse(attempt)
            spent = 0.0
            while attempt.sequence.length < count:
                self._require_wanted(attempt)
                size = self.scheduler.chunk_tokens(self.reading.expect(count - at), self.chunk_tokens)
                part = attempt.tokens[attempt.sequence.length :][:size]
                begun = time.perf_counter()
                logits = self.engine.prefill(attempt.sequence, part, attempt.outbox.put)
                spent += time.perf_counter() - begun
                if not attempt.ticket:
                    self.canary_tokens += len(part)
                if attempt.unread:  # its logits wait for nobody
                    yield
            self._require_wanted(attempt)  # its rows may be someone else's already
            begun = time.perf_counter()
            attempt.outbox.put_logits(np.ascontiguousarray(logits.numpy()[0]))
            self.reading.note(count - at, count - at, spent + time.perf_counter() - begun)
            seconds = time.perf_counter() - started
            metrics = PrefillMetrics(count, seconds, count / seconds, started - asked, at)
            self._read_over(attempt, None, metrics)
            self._keeper.keep(attempt)
            end = End(prompt_tokens=count, queue_s=started - asked, prefill_s=seconds, cached_tokens=at)
            attempt.outbox.finish(end)  # last: whoever has it all ends the ticket
        except DisaggError as error:
            attempt.outbox.fail(error)
            raise
        except Exception as error:
            attempt.outbox.fail(DisaggError(f"the prefill failed: {error}"))
            raise
        finally:
            if not waits:
                self.book.hold(attempt.ticket)
                if attempt.ended or attempt.outbox.failed:  # there is nothing to hold, and nobody else will close it
                    self._close(attempt)
        return metrics

    def _require_wanted(self, attempt: PrefillJob) -> None:
        if attempt.ended:
            raise Cancelled("cancelled before the prompt was read")

    def _reuse(self, attempt: PrefillJob) -> Work[int]:
        """The longest beginning that was read before; the last token is always computed, for its logits."""
        match = self.kv_memory.prefixes.match(attempt.tokens, len(attempt.tokens) - 1) if attempt.ticket else None
        if not match or not match.tokens:
            return 0
        assert attempt.sequence
        for piece in match.slices(self.chunk_tokens):
            self._require_wanted(attempt)
            self.engine.place(attempt.sequence, piece)
            attempt.outbox.put(self.engine.held_as(attempt.sequence, piece))
            if piece.layer == len(attempt.sequence.placed) - 1:
                yield
        self.engine.commit(attempt.sequence, match.tokens)
        return match.tokens

    def _end(self, attempt: PrefillJob) -> None:
        """The ticket ended. Rows go back on the engine's thread, after whatever chunk it is at."""
        self._attempts.pop(attempt.ticket, None)
        attempt.ended, over = True, TicketRefused("the ticket expired or was cancelled")
        attempt.outbox.fail(over)
        attempt.was_admitted(over)
        self._read_over(attempt, Cancelled("cancelled before the prompt was read"))
        self._close_soon(attempt)

    def _close_soon(self, attempt: PrefillJob) -> None:
        with suppress(NodeBusy):  # the engine has stopped, and its memory is gone with it
            self.scheduler.post(lambda: self._close(attempt))

    def _close(self, attempt: PrefillJob) -> None:
        """On the engine's thread."""
        if attempt.keeping or attempt.outbox.readers:  # whose end calls this again
            return
        if attempt.sequence:
            self.kv_memory.close(attempt.sequence)
        attempt.outbox.forget()
        self._release(attempt)

    def _release(self, attempt: PrefillJob) -> None:
        if attempt.claim:
            self.kv_memory.reading.release(attempt.claim)

    def _welcome(self, attempt: PrefillJob, codec: str) -> Welcome:
        count = len(attempt.tokens)
        whole = any(plan.window for plan in self.engine.spec.layout.layers)  # a prefix comes in one piece there
        rows = count if whole else min(self.chunk_tokens, count)
        return Welcome(
            epoch=self.epoch,
            prompt_tokens=count,
            dtype=self.engine.dtype,
            codec=codec,
            chunk_tokens=rows,
            lease_s=self.book.lease_s,
            rounding=self.engine.fingerprint.weights.rounding,
        )

    def _serve(self, sock: socket.socket) -> None:
        """One fetching connection. A receiver that vanished may come back; one that cancelled will not."""
        sock.settimeout(_SILENCE_S)
        served: list[tuple[Hello, PrefillJob]] = []

        def admit(hello: Hello) -> tuple[Welcome, Outbox]:
            if hello.epoch not in ("", self.epoch):
                raise NodeRestarted("this is not the node that gave out the ticket, or it was started again since")
            attempt = (self._canary if hello.canary else self._renew if hello.renew_only else self._redeem)(hello)
            if not hello.canary and hello.prompt_hash not in ("", prompt_hash(attempt.tokens)):
                raise TicketRefused("the tokens that came with this ticket are not those of its prompt")
            served.append((hello, attempt))
            codec = next((name for name in hello.codecs if name in CODECS), "raw")
            return self._welcome(attempt, codec), attempt.outbox

        try:
            end = serve(Connection(sock), admit, lambda: self.book.renew(served[0][0].ticket))
            if end:
                self._stream_done(*served[0])
        except TicketRefused as error:  # often no more than a client that left, told twice
            log.info("a fetch was refused: %s", error, extra=_about(served) | {"code": error.code})
        except Cancelled as error:
            self.book.cancel(served[0][0].ticket)
            log.info("a fetch was cancelled: %s", error, extra=_about(served))
        except DisaggError as error:
            log.warning("a fetch ended early: %s", error, extra=_about(served) | {"code": error.code})
        finally:
            if served and served[0][0].canary:
                self._end(served[0][1])

    def _redeem(self, hello: Hello) -> PrefillJob:
        self.book.redeem(hello.ticket, hello.secret, hello.fetch, hello.fingerprint)
        return self._known(hello.ticket)

    def _renew(self, hello: Hello) -> PrefillJob:
        """The ticket stays unspent: who waits for memory may be refused in the end, and another come for the cache."""
        self.book.check(hello.ticket, hello.secret, hello.fetch, hello.fingerprint)
        self.book.renew(hello.ticket)
        attempt = self._known(hello.ticket)
        with attempt.outbox.reading():  # raises why there will be nothing to come for
            return attempt

    def _canary(self, hello: Hello) -> PrefillJob:
        """The canary prompt, for this connection alone. It is read once: later there may be no room for it."""
        self.book.check(hello.ticket, hello.secret, hello.fetch, hello.fingerprint)
        attempt = PrefillJob(canary_tokens(self.engine.spec.vocabulary))
        if self._canary_read:
            attempt.outbox = self._canary_read.copy()
        else:
            self._read_canary(attempt)
        return attempt

    def _read_canary(self, attempt: PrefillJob) -> "Future[PrefillMetrics | None]":
        def keep(_: object) -> None:
            """On the engine's thread, and the rows are still there; the outbox tells whether it failed."""
            if attempt.outbox.whole:
                self._canary_read = attempt.outbox.copy()

        reading = self.scheduler.start(self._read(attempt, time.perf_counter()), urgent=True)
        reading.add_done_callback(keep)
        return reading

    def read_canary(self) -> None:
        """Before anyone asks for it."""
        attempt = PrefillJob(canary_tokens(self.engine.spec.vocabulary))
        self._read_canary(attempt).exception()
        self.scheduler.call(lambda: self._end(attempt))

    def _stream_done(self, hello: Hello, attempt: PrefillJob) -> None:
        attempt.streams_done.add(hello.stream)
        if not hello.canary and len(attempt.streams_done) == hello.streams:
            self.book.fetched(hello.ticket)

    def _sweep(self) -> None:
        while not self._closing.wait(min(1.0, self.book.lease_s / 4)):
            self.book.sweep()
            self._end_late()

    def _end_late(self) -> None:
        for attempt in list(self._attempts.values()):
            if attempt.deadline < time.monotonic() and not attempt.future.done():
                error = DeadlineExceeded("the prompt was not read in time; send less, or allow more")
                attempt.outbox.fail(error)
                self._read_over(attempt, error)
                attempt.was_admitted(error)
                self.book.cancel(attempt.ticket)

    @property
    def open_requests(self) -> int:
        """Prompts that are waiting or being read."""
        return sum(not attempt.future.done() for attempt in list(self._attempts.values()))

    @property
    def unread_tokens(self) -> int:
        """Of all prompts that wait or are being read."""
        return sum(attempt.unread for attempt in list(self._attempts.values()) if not attempt.future.done())

    def _read_over(
        self, attempt: PrefillJob, error: BaseException | None, metrics: PrefillMetrics | None = None
    ) -> None:
        """Once: a prompt that was read and a ticket that is cancelled may come at the same moment."""
        with suppress(InvalidStateError):
            attempt.future.set_exception(error) if error else attempt.future.set_result(metrics)  # type: ignore[arg-type]
            if attempt.ticket:  # the canary is no request
                self.on_end(metrics, error)

    @property
    def healthy(self) -> bool:
        return self.scheduler.alive and self._listener.alive

    def close(self, drain_s: float = 0.0) -> None:
        """Let prompts be read and caches be fetched, for so long; what is still here then is given up."""
        deadline = time.monotonic() + drain_s
        while len(self.book) and time.monotonic() < deadline:
            time.sleep(0.02)
        self._listener.drain(deadline - time.monotonic())
        self._closing.set()
        self._keeper.stop()
        self._listener.close()
        for attempt in list(self._attempts.values()):
            self.book.cancel(attempt.ticket)


def _about(served: list[tuple[Hello, PrefillJob]]) -> dict[str, str]:
    """For the log; nothing is known of a stranger."""
    return {"ticket": served[0][0].ticket, "request_id": served[0][0].request_id[:100]} if served else {}
