"""The receiving half: frames into memory taken beforehand, slices to whoever places them."""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass

import msgspec
import numpy as np

from disaggregated_inference.errors import Cancelled, ChecksumMismatch, DisaggError, PeerFailed, PeerGone, ProtocolError
from disaggregated_inference.kv import KVLayout, KVSlice
from disaggregated_inference.kv.dtype import Array
from disaggregated_inference.kv_transfer import codecs
from disaggregated_inference.kv_transfer.frames import Connection, Frame, Kind, bytes_of
from disaggregated_inference.kv_transfer.messages import End, ErrorMessage, Hello, Welcome, failure_of, parse

Receiving = Callable[[int], AbstractContextManager[None]]


def _unmeasured(size: int) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one connection brought."""

    end: End
    welcome: Welcome
    payload_bytes: int
    seconds: float


class ConnectionFetch:
    """One connection's state after the greeting: what it may still receive, and the memory it goes into."""

    def __init__(
        self,
        connection: Connection,
        hello: Hello,
        welcome: Welcome,
        layout: KVLayout,
        vocabulary: int,
        most_tokens: int,
        receiving: Receiving = _unmeasured,
    ) -> None:
        self._receiving = receiving
        self.connection, self.hello, self.layout, self.vocabulary = connection, hello, layout, vocabulary
        self.welcome = _require_sane(welcome, hello, most_tokens)
        largest = codecs.payload_bytes(self.welcome.codec, layout, self.welcome.dtype, self.welcome.chunk_tokens)
        self._memory = np.empty(largest, np.uint8)
        self._got_logits = False
        self.payload_bytes = 0

    def next(self) -> KVSlice | Array | End:
        """The next thing that arrives. A slice's arrays are this object's own memory, until the next call."""
        frame = self.connection.receive_header()
        while frame.kind is Kind.ALIVE:
            self.connection.receive_message(frame, limit=0)
            frame = self.connection.receive_header()
        if frame.kind is Kind.SLICE:
            return self._slice(frame)
        if frame.kind is Kind.LOGITS and not self._got_logits and self.hello.stream == 0:
            return self._logits(frame)
        if frame.kind is Kind.END:
            return parse(self.connection.receive_message(frame), End)
        raise _unexpected(self.connection, frame)

    def _slice(self, frame: Frame) -> KVSlice:
        """Every number is checked against the handshake before a byte is read."""
        welcome = self.welcome
        codec = codecs.codec_of(frame.codec)
        if codec != welcome.codec:
            raise ProtocolError(f"codec {codec} after {welcome.codec} was agreed")
        if frame.layer >= len(self.layout.layers) or frame.layer % self.hello.streams != self.hello.stream:
            raise ProtocolError(f"layer {frame.layer} does not belong on stream {self.hello.stream}")
        if not 0 < frame.tokens <= welcome.chunk_tokens or frame.start + frame.tokens > welcome.prompt_tokens:
            raise ProtocolError(f"{frame.tokens} rows from {frame.start} of a prompt of {welcome.prompt_tokens}")
        arrays: list[Array] = []
        at = 0
        for shape, kind in codecs.payload_parts(codec, self.layout, welcome.dtype, frame.tokens):
            size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
            arrays.append(self._memory[at : at + size].view(kind).reshape(shape))
            at += size
        with self._receiving(frame.size):
            self.connection.receive_payload(frame, *(bytes_of(array) for array in arrays))
        self.payload_bytes += frame.size
        return codecs.decode(codec, welcome.dtype, arrays, frame.layer, frame.start)

    def _logits(self, frame: Frame) -> Array:
        logits = np.empty(self.vocabulary, np.float32)
        self.connection.receive_payload(frame, bytes_of(logits))
        if not np.isfinite(logits).all():
            raise ProtocolError("logits that are no numbers")
        self._got_logits = True
        return logits


def _greet(connection: Connection, hello: Hello) -> Welcome:
    asked_at = time.perf_counter()
    connection.send_message(Kind.HELLO, msgspec.json.encode(hello))
    frame = connection.receive_header()
    connection.greeted_s = time.perf_counter() - asked_at
    if frame.kind is not Kind.WELCOME:
        raise _unexpected(connection, frame)
    return parse(connection.receive_message(frame), Welcome)


def _require_sane(welcome: Welcome, hello: Hello, most_tokens: int) -> Welcome:
    """Before memory is taken by what it says."""
    if not 0 < welcome.prompt_tokens <= most_tokens:
        raise ProtocolError(f"a prompt of {welcome.prompt_tokens} tokens where at most {most_tokens} were expected")
    if hello.epoch not in ("", welcome.epoch):
        raise ProtocolError("another node answers at this address")
    if welcome.codec not in hello.codecs:
        raise ProtocolError(f"codec {welcome.codec!r} was not offered")
    if not 0 < welcome.chunk_tokens <= welcome.prompt_tokens:
        raise ProtocolError(f"chunks of {welcome.chunk_tokens} for a prompt of {welcome.prompt_tokens} tokens")
    return welcome


def _unexpected(connection: Connection, frame: Frame) -> DisaggError:
    if frame.kind is Kind.ERROR:
        failure = parse(connection.receive_message(frame), ErrorMessage)
        return PeerFailed(failure.code, failure.message)
    return ProtocolError(f"{frame.kind.name} was not expected here")


def fetch_tokens(connection: Connection, hello: Hello, count: int, vocabulary: int) -> list[int]:
    """The prompt itself, `count` ids of the vocabulary. Closes the connection: at once where the other side is gone."""
    try:
        welcome = _greet(connection, msgspec.structs.replace(hello, tokens_only=True))
        if welcome.prompt_tokens != count:
            raise ProtocolError(f"a prompt of {welcome.prompt_tokens} tokens where {count} were expected")
        tokens = receive_tokens(connection, count, vocabulary)
        connection.send_message(Kind.DONE)
        return tokens
    except PeerGone:
        if not connection.cancelled:
            connection.sock.close()
        raise
    finally:
        connection.part()


def renew(connection: Connection, hello: Hello) -> float:
    """Say that someone will come, and take nothing. Returns how long the cache is held from now on. Closes the
    connection."""
    try:
        welcome = _greet(connection, msgspec.structs.replace(hello, renew_only=True, canary=False))
        connection.send_message(Kind.DONE)
        return welcome.lease_s
    except PeerGone:
        connection.sock.close()
        raise
    finally:
        connection.part()


def receive_tokens(connection: Connection, count: int, vocabulary: int) -> list[int]:
    frame = connection.receive_header()
    if frame.kind is not Kind.TOKENS:
        raise _unexpected(connection, frame)
    tokens = np.empty(count, "<u4")
    connection.receive_payload(frame, bytes_of(tokens))
    if int(tokens.max()) >= vocabulary:
        raise ProtocolError(f"token {int(tokens.max())} is not in the vocabulary of {vocabulary}")
    ids: list[int] = tokens.tolist()
    return ids


def fetch(
    connection: Connection,
    hello: Hello,
    layout: KVLayout,
    vocabulary: int,
    most_tokens: int,
    on_slice: Callable[[KVSlice], None],
    on_logits: Callable[[Array], None],
    receiving: Receiving = _unmeasured,
) -> Receipt:
    """One connection from HELLO to END, told DONE only after the last slice was taken. Closes the connection.

    `on_slice` must be done with the arrays when it returns. If it raises, the sender is told to stop; if the connection
    itself breaks it is not, because another connection may resume. `receiving` is entered around every slice's arrival.
    """
    started = time.perf_counter()
    finished = threading.Event()

    def renew(every_s: float) -> None:
        with suppress(DisaggError):
            while not finished.wait(every_s):
                connection.send_message(Kind.RENEW)

    try:
        state = ConnectionFetch(
            connection, hello, _greet(connection, hello), layout, vocabulary, most_tokens, receiving
        )
        every_s = max(0.1, min(5.0, state.welcome.lease_s / 3))
        threading.Thread(target=renew, args=(every_s,), name="kv-renew", daemon=True).start()
        while not isinstance(item := state.next(), End):
            on_slice(item) if isinstance(item, KVSlice) else on_logits(item)
        connection.send_message(Kind.DONE)
        return Receipt(item, state.welcome, state.payload_bytes, time.perf_counter() - started)
    except (PeerGone, ChecksumMismatch):
        if not connection.cancelled:
            connection.sock.close()  # nothing more can be said here; another connection may resume
        raise
    except BaseException as error:
        connection.cancel(b"" if isinstance(error, Cancelled) else failure_of(error))
        raise
    finally:
        finished.set()
        connection.part()
