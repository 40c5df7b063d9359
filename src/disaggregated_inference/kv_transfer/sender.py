"""The sending side: an outbox that the engine fills while it computes, and the loop that sends it on a connection."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import msgspec
import numpy as np

from disaggregated_inference.errors import Cancelled, ChecksumMismatch, DisaggError, PeerGone, ProtocolError
from disaggregated_inference.kv import Array, KVSlice, LogprobRows
from disaggregated_inference.kv_transfer import codecs
from disaggregated_inference.kv_transfer.authenticated_frames import FrameKeys, is_nonce, new_nonce
from disaggregated_inference.kv_transfer.frames import Connection, Frame, Kind, bytes_of
from disaggregated_inference.kv_transfer.messages import End, ErrorMessage, Hello, Welcome, decode_message, encode_error

_MAX_STREAMS = 64
MIN_PART_BYTES = 4 << 20  # smaller parts wait for each other more than they save


class Outbox:
    """What one prefill has produced so far. Readers do not consume it: a connection that resumes reads it again.

    The engine's thread writes, any number of sender threads read. Prompt logprobs overtake waiting slices, and so do
    logits after them. `prompt_logprobs`: how many alternatives they have; None: there are none.
    """

    def __init__(self, tokens: Sequence[int] = (), prompt_logprobs: int | None = None) -> None:
        self.tokens, self.prompt_logprobs = tokens, prompt_logprobs
        self._logprobs: list[LogprobRows] = []
        self._changed = threading.Condition()
        self._slices: list[KVSlice] = []
        self._logits: Array | None = None
        self.computed_at = 0.0  # when the prefill's computing ended, on the clock of time.perf_counter
        self._end: End | None = None
        self._error: DisaggError | None = None
        self.readers = 0  # senders that use a slice's memory now
        self.on_released: Callable[[], None] = lambda: None  # called when the last reader of a failed outbox is done

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around the use of a slice's memory, which must not be reused meanwhile."""
        with self._changed:
            if self._error:
                raise self._error
            self.readers += 1
        try:
            yield
        finally:
            with self._changed:
                self.readers -= 1
                last = self._error is not None and not self.readers
            if last:
                self.on_released()

    def put(self, piece: KVSlice) -> None:
        with self._changed:
            self._slices.append(piece)
            self._changed.notify_all()

    def put_logprobs(self, rows: LogprobRows) -> None:
        with self._changed:
            self._logprobs.append(rows)
            self._changed.notify_all()

    def put_logits(self, logits: Array) -> None:
        """The last thing that a prefill computes."""
        with self._changed:
            self._logits, self.computed_at = logits, time.perf_counter()
            self._changed.notify_all()

    def finish(self, end: End) -> None:
        with self._changed:
            self._end = end
            self._changed.notify_all()

    def fail(self, error: DisaggError) -> None:
        """Readers stop, even if everything was computed: the memory behind the slices will be freed."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def slices(self) -> list[KVSlice]:
        with self._changed:
            return list(self._slices)

    def copy(self) -> "Outbox":
        """A copy with its own memory."""
        with self._changed:
            other, other._slices = Outbox(self.tokens), [piece.copy() for piece in self._slices]
            other._logits, other._end, other._error = self._logits, self._end, self._error
            other.computed_at = self.computed_at
        return other

    @property
    def complete(self) -> bool:
        return self._end is not None and not self._error

    def clear(self) -> None:
        """Free everything now: pinned memory that waits for the garbage collector is missing for the next prompt."""
        with self._changed:
            self._slices, self._logprobs, self._logits, self.on_released = [], [], None, lambda: None

    @property
    def failed(self) -> bool:
        return self._error is not None

    def wake_readers(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def next(
        self,
        at: int,
        want_logits: bool,
        stopped: Callable[[], object] = lambda: False,
        wait_s: float | None = None,
        logprobs_at: int | None = None,
    ) -> "KVSlice | LogprobRows | Array | End | None":
        """Prompt logprobs number `logprobs_at`, else logits if wanted and present, else slice number `at`, else the
        end. None after `wait_s` without any of them, or when `stopped`, which is checked after every change and by
        `wake_readers`."""

        def ready() -> bool:
            return bool(stopped() or self._has_logprobs(logprobs_at) or self._ready(at, want_logits))

        with self._changed:
            if not self._changed.wait_for(ready, wait_s) or stopped():
                return None
            if self._error:
                raise self._error
            if logprobs_at is not None and self._has_logprobs(logprobs_at):
                return self._logprobs[logprobs_at]
            if want_logits and self._logits is not None:
                return self._logits
            if at < len(self._slices):
                return self._slices[at]
            return self._end

    def _has_logprobs(self, at: int | None) -> bool:
        return at is not None and at < len(self._logprobs)

    def _ready(self, at: int, want_logits: bool) -> bool:
        has_logits = want_logits and self._logits is not None
        return bool(has_logits or at < len(self._slices) or self._end or self._error)


Admit = Callable[[Hello], tuple[Welcome, Outbox]]
SecretOf = Callable[[str], str]  # of a ticket; raises for one that does not exist


def serve(
    connection: Connection,
    admit: Admit,
    renew: Callable[[], None] = lambda: None,
    secret_of: SecretOf | None = None,
    min_part_bytes: int = MIN_PART_BYTES,
) -> End | None:
    """Serve one connection, from HELLO to the receiver's DONE. Returns the END that was sent; None if no KV was wanted.

    `admit` checks ticket, secret and fingerprint, and raises to refuse; `renew` is called for every RENEW. Raises
    `Cancelled` if the receiver no longer wants the KV, `PeerGone` if it vanished (it may come back and resume).
    With `secret_of` the connection is in the authenticated mode. A slice is parted between the streams where each part
    has at least `min_part_bytes`.
    """
    peer: _ReceiverListener | None = None
    try:
        hello = _receive_hello(connection, secret_of)
        if not 0 <= hello.stream < hello.streams <= _MAX_STREAMS:
            raise ProtocolError(f"stream {hello.stream} of {hello.streams}; at most {_MAX_STREAMS}")
        welcome, outbox = admit(hello)
        _send_welcome(connection, welcome)
        peer = _ReceiverListener(connection, outbox, renew)
        end = None
        if hello.tokens_only:
            send_tokens(connection, outbox.tokens)
        elif not hello.renew_only:
            end = _send_all(connection, hello, welcome, outbox, peer, min_part_bytes)
        peer.wait_until_done()
        return end
    except DisaggError as error:
        reason = (peer and peer.stop_reason(wait=isinstance(error, PeerGone))) or error
        _send_error(connection, reason)
        raise reason from None
    finally:
        connection.close()


def _send_welcome(connection: Connection, welcome: Welcome) -> None:
    if connection.keys:
        nonce = new_nonce()
        connection.keys, welcome = connection.keys.complete(nonce), msgspec.structs.replace(welcome, nonce=nonce)
    connection.send_message(Kind.WELCOME, msgspec.json.encode(welcome))


def _receive_hello(connection: Connection, secret_of: SecretOf | None) -> Hello:
    """One deadline for the whole HELLO: a peer that sends it byte by byte must not hold a connection."""
    timeout_s, hello_s = connection.sock.gettimeout(), connection.timeouts.hello_s
    connection.sock.settimeout(min(hello_s, timeout_s or hello_s))
    connection.deadline, connection.keyed = time.monotonic() + hello_s, secret_of is not None
    frame = connection.receive_header()
    if frame.kind is not Kind.HELLO:
        raise ProtocolError(f"a connection starts with HELLO, not {frame.kind.name}")
    if secret_of:
        hello = _keyed_hello(connection, frame, secret_of)
    else:
        hello = decode_message(connection.receive_message(frame), Hello)
    connection.sock.settimeout(timeout_s)
    connection.deadline, connection.hello_at = None, time.perf_counter()
    return hello


def _keyed_hello(connection: Connection, frame: Frame, secret_of: SecretOf) -> Hello:
    """The tag proves that the peer knows the ticket's secret, as the secret itself does in the plain mode."""
    found: list[str] = []

    def keys_of(content: bytes) -> FrameKeys:
        hello = decode_message(content, Hello)
        if isinstance(hello.nonce, msgspec.UnsetType) or not is_nonce(hello.nonce):
            raise ProtocolError("a HELLO of the authenticated mode has a nonce")
        found.append(secret_of(hello.ticket))
        return FrameKeys("sender", found[0], hello.nonce)

    try:
        content = connection.receive_unproven(frame, keys_of)
    except ChecksumMismatch:
        connection.keys = None  # the peer does not have the key: it could not read a refusal in it
        raise
    return msgspec.structs.replace(decode_message(content, Hello), secret=found[0])


def _send_all(
    connection: Connection,
    hello: Hello,
    welcome: Welcome,
    outbox: Outbox,
    peer: "_ReceiverListener",
    min_part_bytes: int,
) -> End:
    """Send this stream's rows from the receiver's held tokens on; logits and prompt logprobs go with stream 0. Slices
    that are skipped send no bytes, so they do not replace an ALIVE."""
    at, want_logits, sent_at = 0, hello.stream == 0, time.monotonic()
    logprobs_at = 0 if want_logits and hello.prompt_logprobs is not msgspec.UNSET else None
    heartbeat_s = connection.timeouts.heartbeat_s
    while True:
        item = outbox.next(at, want_logits, lambda: peer.error, heartbeat_s, logprobs_at)
        if peer.error:
            raise peer.error
        if isinstance(item, End):
            end = msgspec.structs.replace(item, computed_s=outbox.computed_at - connection.hello_at)
            connection.send_message(Kind.END, msgspec.json.encode(end))
            return end
        if isinstance(item, KVSlice):
            at += 1
            if part := _part_for(hello, item, min_part_bytes):
                with outbox.reading():
                    _wait_for_copy(connection, item, peer, sent_at)
                    send_slice(connection, part, welcome.codec)
            elif time.monotonic() - sent_at < heartbeat_s:
                continue
            else:
                connection.send_message(Kind.ALIVE)
        elif isinstance(item, LogprobRows):
            logprobs_at = (logprobs_at or 0) + 1
            if item.stop <= (hello.scored_tokens or 0):
                continue
            _send_logprobs(connection, item)
        elif item is None:
            connection.send_message(Kind.ALIVE)
        else:
            want_logits = False
            data = bytes_of(item)
            connection.send(Frame(Kind.LOGITS, len(data)), data)
        sent_at = time.monotonic()


def _wait_for_copy(connection: Connection, piece: KVSlice, peer: "_ReceiverListener", sent_at: float) -> None:
    """A device that is busy with other prompts may take seconds to copy this one's rows."""
    while not piece.ready():
        if peer.error:
            raise peer.error
        if time.monotonic() - sent_at >= connection.timeouts.heartbeat_s:
            connection.send_message(Kind.ALIVE)
            sent_at = time.monotonic()
        time.sleep(connection.timeouts.poll_copy_s)


def send_tokens(connection: Connection, tokens: Sequence[int]) -> None:
    data = bytes_of(np.array(tokens, "<u4"))
    connection.send(Frame(Kind.TOKENS, len(data)), data)


def _send_logprobs(connection: Connection, rows: LogprobRows) -> None:
    arrays = [bytes_of(array) for array in (rows.logprobs, rows.top_tokens, rows.top_logprobs)]
    frame = Frame(Kind.LOGPROBS, sum(map(len, arrays)), tokens=len(rows.logprobs), start=rows.start)
    connection.send(frame, *arrays)


def _part_for(hello: Hello, piece: KVSlice, min_part_bytes: int) -> KVSlice | None:
    """The rows that go over this stream. All streams share a large slice, or its last rows would arrive late: one
    connection alone is slow. A sliding layer's rows stay together: only whole they say where its window begins."""
    if piece.stop <= hello.held_tokens:
        return None
    piece = piece.part(max(0, hello.held_tokens - piece.start), piece.tokens)  # its prefix cache may hold some rows
    plan = hello.fingerprint.layout.layers[piece.layer]
    parts = 1 if plan.window else max(1, min(hello.streams, piece.tokens, piece.size_bytes // min_part_bytes))
    number = (hello.stream - piece.layer) % hello.streams
    if number >= parts:
        return None
    return piece.part(piece.tokens * number // parts, piece.tokens * (number + 1) // parts)


def send_slice(connection: Connection, piece: KVSlice, codec: str) -> None:
    piece.wait()
    arrays = [bytes_of(array) for array in codecs.encode(codec, piece)]
    size = sum(map(len, arrays))
    frame = Frame(Kind.SLICE, size, codecs.CODECS[codec], piece.layer, piece.tokens, piece.start, piece.rest)
    connection.send(frame, *arrays)


def _send_error(connection: Connection, error: DisaggError) -> None:
    with suppress(DisaggError):
        connection.send_message(Kind.ERROR, encode_error(error))


class _ReceiverListener:
    """Reads the receiver's frames on its own thread while slices are sent: RENEW, CANCEL, ERROR, DONE."""

    def __init__(self, connection: Connection, outbox: Outbox, renew: Callable[[], None]) -> None:
        self._connection, self._outbox, self._renew = connection, outbox, renew
        self.error: DisaggError | None = None
        self._done = threading.Event()
        threading.Thread(target=self._listen, name="kv-peer", daemon=True).start()

    def stop_reason(self, wait: bool) -> DisaggError | None:
        """If sending failed because the receiver left, its error may not have been read yet."""
        self._done.wait(self._connection.timeouts.last_words_s if wait else 0)
        return self.error

    def wait_until_done(self) -> None:
        self._done.wait()
        if self.error:
            raise self.error

    def _listen(self) -> None:
        try:
            while self._next() is not Kind.DONE:
                pass
        except DisaggError as error:
            self.error = error
        self._done.set()
        self._outbox.wake_readers()

    def _next(self) -> Kind:
        frame = self._connection.receive_header()
        if frame.kind is Kind.ERROR:
            failure = decode_message(self._connection.receive_message(frame), ErrorMessage)
            raise Cancelled(f"the receiver gave up: {failure.message} ({failure.code})")
        self._connection.receive_message(frame, limit=0)
        if frame.kind is Kind.CANCEL:
            raise Cancelled("the receiver no longer wants this KV")
        if frame.kind is Kind.RENEW:
            self._renew()
        elif frame.kind is not Kind.DONE:
            raise ProtocolError(f"a receiver may not send {frame.kind.name}")
        return frame.kind
