"""A KV cache as one byte string: the frames of a transfer, one after the other.

For the inline form of the API: small experiments with HTTP alone. It starts with a HELLO that carries the sender's
fingerprint; WELCOME, TOKENS, slices, logits and END follow, checked as strictly as on a socket.
"""

import socket

import msgspec
import numpy as np

from disaggregated_inference.errors import BadRequest, ProtocolError
from disaggregated_inference.kv import Fingerprint, KVLayout, KVSlice, LogprobRows, as_dtype, require_same_model
from disaggregated_inference.kv_transfer import codecs
from disaggregated_inference.kv_transfer.frames import Connection, Frame, Kind, bytes_of
from disaggregated_inference.kv_transfer.messages import End, Hello, Welcome, decode_message
from disaggregated_inference.kv_transfer.placement import Sink
from disaggregated_inference.kv_transfer.receiver import ConnectionFetch, receive_tokens
from disaggregated_inference.kv_transfer.sender import Outbox, send_slice, send_tokens


class _InlineBuffer:
    """Memory in the place of a Connection's socket."""

    family = socket.AF_UNIX

    def __init__(self, content: bytes = b"", limit_bytes: int = 0) -> None:
        self.content = bytearray(content)
        self._at, self._limit = 0, limit_bytes

    def sendmsg(self, parts: list[memoryview]) -> int:
        size = sum(map(len, parts))
        if len(self.content) + size > self._limit:
            raise BadRequest(
                f"this KV cache is larger than the inline form allows ({self._limit} bytes): fetch it by its ticket"
            )
        for part in parts:
            self.content += part
        return size

    @property
    def left(self) -> int:
        return len(self.content) - self._at

    def recv_into(self, target: memoryview) -> int:
        if not self.left:
            raise ProtocolError("the inline KV cache is truncated")
        piece = memoryview(self.content)[self._at : self._at + len(target)]
        target[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)


def encode_inline(fingerprint: Fingerprint, welcome: Welcome, outbox: Outbox, limit_bytes: int) -> bytes:
    """The outbox must be complete."""
    buffer = _InlineBuffer(limit_bytes=limit_bytes)
    connection = Connection(buffer)  # type: ignore[arg-type]
    hello = Hello(ticket="", secret="", fetch="", fingerprint=fingerprint)
    connection.send_message(Kind.HELLO, msgspec.json.encode(hello))
    connection.send_message(Kind.WELCOME, msgspec.json.encode(welcome))
    send_tokens(connection, outbox.tokens)
    at, want_logits = 0, True
    while not isinstance(item := outbox.next(at, want_logits), End):
        assert not isinstance(item, LogprobRows)
        if isinstance(item, KVSlice):
            send_slice(connection, item, welcome.codec)
            at += 1
        elif item is not None:
            data = bytes_of(item)
            connection.send(Frame(Kind.LOGITS, len(data)), data)
            want_logits = False
    connection.send_message(Kind.END, msgspec.json.encode(item))
    return bytes(buffer.content)


class InlineReader:
    """Checks the handshake and the prompt at once; `read_into` reads the KV."""

    def __init__(
        self, content: bytes, fingerprint: Fingerprint, layout: KVLayout, vocabulary: int, max_tokens: int
    ) -> None:
        self._buffer = _InlineBuffer(content)
        connection = Connection(self._buffer)  # type: ignore[arg-type]
        hello = decode_message(_expect(connection, Kind.HELLO), Hello)
        require_same_model(fingerprint, hello.fingerprint)
        self.welcome = decode_message(_expect(connection, Kind.WELCOME), Welcome)
        plain = Hello(ticket="", secret="", fetch="", fingerprint=fingerprint, codecs=tuple(codecs.CODECS))
        self._fetch = ConnectionFetch(connection, plain, self.welcome, layout, vocabulary, max_tokens)
        self.tokens = receive_tokens(connection, self.welcome.prompt_tokens, vocabulary)
        self._placed = [0] * len(layout.layers)

    def read_into(self, sink: Sink) -> End:
        while not isinstance(item := self._fetch.next(), End):
            assert not isinstance(item, LogprobRows)  # they were not asked for: `next` refuses them
            if isinstance(item, KVSlice):
                self._place(item, sink)
            else:
                sink.logits(item)
        if self._buffer.left:
            raise ProtocolError("the inline KV cache has bytes after its END")
        return item

    def _place(self, piece: KVSlice, sink: Sink) -> None:
        if not all(np.isfinite(as_dtype(rows, piece.dtype, "float32")).all() for rows in (piece.keys, piece.values)):
            raise ProtocolError("the KV rows contain NaN or infinity")
        sink.place(piece)
        self._placed[piece.layer] = piece.stop
        if all(stop == piece.stop for stop in self._placed):
            sink.commit(piece.stop)


def _expect(connection: Connection, kind: Kind) -> bytes:
    frame = connection.receive_header()
    if frame.kind is not kind:
        raise ProtocolError(f"the inline KV cache has {frame.kind.name} where {kind.name} is expected")
    return connection.receive_message(frame)
