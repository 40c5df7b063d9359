"""The receiving side of one connection: frames go into preallocated memory, slices to a callback."""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from disaggregated_inference.errors import (
    ChecksumMismatch,
    DisaggError,
    PeerFailed,
    PeerGone,
    ProtocolError,
    TicketRefused,
)
from disaggregated_inference.kv import LOWEST_LOGPROB, Array, KVLayout, KVSlice, LogprobRows
from disaggregated_inference.kv_transfer import codecs
from disaggregated_inference.kv_transfer.authenticated_frames import FrameKeys, is_nonce, new_nonce
from disaggregated_inference.kv_transfer.frames import Connection, Frame, Kind, bytes_of, no_answer
from disaggregated_inference.kv_transfer.messages import End, ErrorMessage, Hello, Welcome, decode_message

log = logging.getLogger(__name__)

Measure = Callable[[int], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class ConnectionResult:
    end: End
    welcome: Welcome
    payload_bytes: int
    computed_at: float  # when the sender's computing ended, by this side's clock; too early by the HELLO's way


class ConnectionFetch:
    """One connection after the handshake: checks each frame against it and reads into its own memory."""

    def __init__(
        self,
        connection: Connection,
        hello: Hello,
        welcome: Welcome,
        layout: KVLayout,
        vocabulary: int,
        max_tokens: int,
        measure: Measure = nullcontext,
    ) -> None:
        self._measure = measure
        self.connection, self.hello, self.layout, self.vocabulary = connection, hello, layout, vocabulary
        self.welcome = _require_valid(welcome, hello, max_tokens)
        largest = codecs.payload_bytes(self.welcome.codec, layout, self.welcome.dtype, self.welcome.chunk_tokens)
        self._memory = np.empty(largest, np.uint8)
        self._has_logits = False
        self.payload_bytes = 0

    def next(self) -> KVSlice | LogprobRows | Array | End:
        """The next item. A slice's arrays are valid until the next call."""
        frame = self.connection.receive_header()
        while frame.kind is Kind.ALIVE:
            self.connection.receive_message(frame, limit=0)
            frame = self.connection.receive_header()
        if frame.kind is Kind.SLICE:
            return self._slice(frame)
        if frame.kind is Kind.LOGITS and not self._has_logits and self.hello.stream == 0:
            return self._logits(frame)
        if frame.kind is Kind.LOGPROBS and not self._has_logits and self.hello.stream == 0:
            return self._logprobs(frame)
        if frame.kind is Kind.END:
            return decode_message(self.connection.receive_message(frame), End)
        raise _unexpected_frame(self.connection, frame)

    def _slice(self, frame: Frame) -> KVSlice:
        """Every header field is checked against the handshake before the payload is read."""
        welcome = self.welcome
        codec = codecs.codec_of(frame.codec)
        if codec != welcome.codec:
            raise ProtocolError(f"codec {codec} after {welcome.codec} was agreed")
        if frame.layer >= len(self.layout.layers):
            raise ProtocolError(f"layer {frame.layer} of a model with {len(self.layout.layers)} layers")
        rows = frame.tokens + frame.rest
        if not frame.tokens or rows > welcome.chunk_tokens or frame.start + rows > welcome.prompt_tokens:
            raise ProtocolError(f"{rows} rows from {frame.start} of a prompt of {welcome.prompt_tokens}")
        if frame.rest and (self.hello.streams == 1 or self.layout.layers[frame.layer].window):
            raise ProtocolError(f"a slice of layer {frame.layer} in parts, which belongs together")
        arrays: list[Array] = []
        at = 0
        for shape, kind in codecs.payload_parts(codec, self.layout, welcome.dtype, frame.tokens):
            size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
            arrays.append(self._memory[at : at + size].view(kind).reshape(shape))
            at += size
        with self._measure(frame.size):
            self.connection.receive_payload(frame, *(bytes_of(array) for array in arrays))
        self.payload_bytes += frame.size
        return replace(codecs.decode(codec, welcome.dtype, arrays, frame.layer, frame.start), rest=frame.rest)

    def _logits(self, frame: Frame) -> Array:
        logits = np.empty(self.vocabulary, np.float32)
        self.connection.receive_payload(frame, bytes_of(logits))
        if not np.isfinite(logits).all():
            raise ProtocolError("the logits contain NaN or infinity")
        self._has_logits = True
        return logits

    def _logprobs(self, frame: Frame) -> LogprobRows:
        alternatives, count = self.hello.prompt_logprobs, frame.tokens
        if isinstance(alternatives, msgspec.UnsetType):
            raise ProtocolError("prompt logprobs were not asked for")
        if not 0 < count <= self.welcome.chunk_tokens or not 0 < frame.start <= self.welcome.prompt_tokens - count:
            tokens = self.welcome.prompt_tokens
            raise ProtocolError(f"logprobs of {count} tokens from {frame.start} of a prompt of {tokens}")
        kept = min(alternatives, self.vocabulary)
        logprobs, top = np.empty(count, "<f4"), np.empty((count, kept), "<f4")
        tokens_there = np.empty((count, kept), "<u4")
        self.connection.receive_payload(frame, *map(bytes_of, (logprobs, tokens_there, top)))
        for found in (logprobs, top):
            if not ((found >= LOWEST_LOGPROB) & (found <= 0)).all():  # false for NaN
                raise ProtocolError("the logprobs of the prompt are not logarithms of probabilities")
        if (tokens_there >= self.vocabulary).any():
            raise ProtocolError(f"the logprobs of the prompt name a token beyond the vocabulary of {self.vocabulary}")
        return LogprobRows(frame.start, logprobs, tokens_there, top)


def handshake(connection: Connection, hello: Hello) -> Welcome:
    connection.hello_at = time.perf_counter()
    send_hello(connection, hello)
    frame = _first_header(connection)
    connection.handshake_s = time.perf_counter() - connection.hello_at
    if frame.kind is not Kind.WELCOME:
        raise _unexpected_frame(connection, frame)
    if not connection.keys:
        return decode_message(connection.receive_message(frame), Welcome)
    keys = connection.keys
    content = connection.receive_unproven(frame, lambda content: keys.complete(_nonce(content)))
    return decode_message(content, Welcome)


def _first_header(connection: Connection) -> Frame:
    """Until a node has answered, all failures look the same: an error that a client gets must not tell what listens at
    an address. A sender that does not know the ticket has no key to refuse it with."""
    try:
        return connection.receive_header()
    except (PeerGone, ProtocolError, ChecksumMismatch) as error:
        if connection.keyed and connection.answered_plainly:
            message = "the prefill node does not know the ticket, or it has another --kv-security"
            raise PeerFailed(TicketRefused("").code, message) from error
        if connection.place and not connection.cancelled:
            log.info("%s gave no answer: %s", connection.place, error)
            raise no_answer(connection.place) from error
        raise


def send_hello(connection: Connection, hello: Hello) -> None:
    """In the authenticated mode without the secret, which is the key of its tag."""
    if hello.keyed is True:
        nonce = new_nonce()
        connection.keys, connection.keyed = FrameKeys("receiver", hello.secret, nonce), True
        hello = msgspec.structs.replace(hello, secret="", nonce=nonce)
    connection.send_message(Kind.HELLO, msgspec.json.encode(hello))


def _nonce(content: bytes) -> str:
    nonce = decode_message(content, Welcome).nonce
    if isinstance(nonce, msgspec.UnsetType) or not is_nonce(nonce):
        raise ProtocolError("a WELCOME of the authenticated mode has a nonce")
    return nonce


def _require_valid(welcome: Welcome, hello: Hello, max_tokens: int) -> Welcome:
    """Before memory is allocated from its values."""
    if not 0 < welcome.prompt_tokens <= max_tokens:
        raise ProtocolError(f"a prompt of {welcome.prompt_tokens} tokens where at most {max_tokens} were expected")
    if hello.epoch not in ("", welcome.epoch):
        raise ProtocolError("another node answers at this address")
    if welcome.codec not in hello.codecs:
        raise ProtocolError(f"codec {welcome.codec!r} was not offered")
    if not 0 < welcome.chunk_tokens <= welcome.prompt_tokens:
        raise ProtocolError(f"chunks of {welcome.chunk_tokens} for a prompt of {welcome.prompt_tokens} tokens")
    return welcome


def _unexpected_frame(connection: Connection, frame: Frame) -> DisaggError:
    if frame.kind is Kind.ERROR:
        failure = decode_message(connection.receive_message(frame), ErrorMessage)
        return PeerFailed(failure.code, failure.message)
    return ProtocolError(f"{frame.kind.name} was not expected here")


def fetch_tokens(connection: Connection, hello: Hello, count: int, vocabulary: int) -> list[int]:
    """The prompt's token ids. Closes the connection; at once if the peer is gone."""
    with connection.closing():
        welcome = handshake(connection, msgspec.structs.replace(hello, tokens_only=True))
        if welcome.prompt_tokens != count:
            raise ProtocolError(f"a prompt of {welcome.prompt_tokens} tokens where {count} were expected")
        tokens = receive_tokens(connection, count, vocabulary)
        connection.send_message(Kind.DONE)
        return tokens


def renew(connection: Connection, hello: Hello) -> float:
    """Renew the ticket's lease and receive nothing. Returns the lease in seconds. Closes the connection."""
    with connection.closing():
        welcome = handshake(connection, msgspec.structs.replace(hello, renew_only=True, canary=False))
        connection.send_message(Kind.DONE)
        return welcome.lease_s


def receive_tokens(connection: Connection, count: int, vocabulary: int) -> list[int]:
    frame = connection.receive_header()
    if frame.kind is not Kind.TOKENS:
        raise _unexpected_frame(connection, frame)
    tokens = np.empty(count, "<u4")
    connection.receive_payload(frame, bytes_of(tokens))
    if int(tokens.max()) >= vocabulary:
        raise ProtocolError(f"token {int(tokens.max())} is not in the vocabulary of {vocabulary}")
    ids: list[int] = tokens.tolist()
    return ids


def fetch_stream(
    connection: Connection,
    hello: Hello,
    layout: KVLayout,
    vocabulary: int,
    max_tokens: int,
    on_slice: Callable[[KVSlice], None],
    on_logits: Callable[[Array], None],
    measure: Measure = nullcontext,
    on_logprobs: Callable[[LogprobRows], None] = lambda rows: None,
) -> ConnectionResult:
    """One connection from HELLO to END. Sends DONE after `on_slice` took the last slice. Closes the connection.

    `on_slice` may not keep the arrays after it returns. If it raises, the sender is told to stop. If the connection
    breaks, the sender is not told: another connection may resume. `measure` is entered around every slice's arrival.
    """
    finished, limits = threading.Event(), connection.timeouts

    def renew_every(every_s: float) -> None:
        with suppress(DisaggError):
            while not finished.wait(every_s):
                connection.send_message(Kind.RENEW)

    with connection.closing():
        try:
            welcome = handshake(connection, hello)
            state = ConnectionFetch(connection, hello, welcome, layout, vocabulary, max_tokens, measure)
            every_s = max(limits.min_renew_s, min(limits.renew_s, welcome.lease_s / 3))
            threading.Thread(target=renew_every, args=(every_s,), name="kv-renew", daemon=True).start()
            while not isinstance(item := state.next(), End):
                if isinstance(item, KVSlice):
                    on_slice(item)
                elif isinstance(item, LogprobRows):
                    on_logprobs(item)
                else:
                    on_logits(item)
            connection.send_message(Kind.DONE)
            return ConnectionResult(item, welcome, state.payload_bytes, connection.hello_at + item.computed_s)
        except (PeerGone, ChecksumMismatch):
            raise
        except BaseException as error:
            connection.cancel(error)
            raise
        finally:
            finished.set()
