"""A cache as one piece of memory: the frames that would have gone over the wire, one after the other.

For the inline form of the API: small experiments with nothing but HTTP. A tape begins with a HELLO that says whose
cache it is; then WELCOME, TOKENS, slices, logits and END, checked as strictly as if they came from a socket.
"""

import socket

import msgspec
import numpy as np

from disaggregated_inference.errors import BadRequest, ProtocolError
from disaggregated_inference.kv import Fingerprint, KVLayout, KVSlice, as_dtype
from disaggregated_inference.kv.fingerprint import require_same_model
from disaggregated_inference.kv_transfer import codecs
from disaggregated_inference.kv_transfer.fetch import Sink
from disaggregated_inference.kv_transfer.frames import Connection, Frame, Kind, bytes_of
from disaggregated_inference.kv_transfer.messages import End, Hello, Welcome, parse
from disaggregated_inference.kv_transfer.receiver import ConnectionFetch, receive_tokens
from disaggregated_inference.kv_transfer.sender import Outbox, send_slice, send_tokens


class _InlineBuffer:
    """Memory that Connection takes for a socket."""

    family = socket.AF_UNIX

    def __init__(self, content: bytes = b"", limit_bytes: int = 0) -> None:
        self.content = bytearray(content)
        self._at, self._limit = 0, limit_bytes

    def sendmsg(self, parts: list[memoryview]) -> int:
        size = sum(map(len, parts))
        if len(self.content) + size > self._limit:
            raise BadRequest(f"this cache is larger than the inline form allows ({self._limit} bytes): use the ticket")
        for part in parts:
            self.content += part
        return size

    @property
    def left(self) -> int:
        return len(self.content) - self._at

    def recv_into(self, target: memoryview) -> int:
        if not self.left:
            raise ProtocolError("it is cut short")
        piece = memoryview(self.content)[self._at : self._at + len(target)]
        target[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)


def record(fingerprint: Fingerprint, welcome: Welcome, outbox: Outbox, limit_bytes: int) -> bytes:
    """A cache that is complete in its outbox."""
    tape = _InlineBuffer(limit_bytes=limit_bytes)
    connection = Connection(tape)  # type: ignore[arg-type]
    hello = Hello(ticket="", secret="", fetch="", fingerprint=fingerprint)
    connection.send_message(Kind.HELLO, msgspec.json.encode(hello))
    connection.send_message(Kind.WELCOME, msgspec.json.encode(welcome))
    send_tokens(connection, outbox.tokens)
    at, want_logits = 0, True
    while not isinstance(item := outbox.next(at, want_logits, lambda: False), End):
        if isinstance(item, KVSlice):
            send_slice(connection, item, welcome.codec)
            at += 1
        elif item is not None:
            data = bytes_of(item)
            connection.send(Frame(Kind.LOGITS, len(data)), data)
            want_logits = False
    connection.send_message(Kind.END, msgspec.json.encode(item))
    return bytes(tape.content)


class InlineReader:
    """A tape's beginning, checked; `play` does the rest."""

    def __init__(
        self, content: bytes, fingerprint: Fingerprint, layout: KVLayout, vocabulary: int, most_tokens: int
    ) -> None:
        self._tape = _InlineBuffer(content)
        connection = Connection(self._tape)  # type: ignore[arg-type]
        said = parse(_expect(connection, Kind.HELLO), Hello)
        require_same_model(fingerprint, said.fingerprint)
        self.welcome = parse(_expect(connection, Kind.WELCOME), Welcome)
        plain = Hello(ticket="", secret="", fetch="", fingerprint=fingerprint, codecs=tuple(codecs.CODECS))
        self._fetch = ConnectionFetch(connection, plain, self.welcome, layout, vocabulary, most_tokens)
        self.tokens = receive_tokens(connection, self.welcome.prompt_tokens, vocabulary)
        self._placed = [0] * len(layout.layers)

    def play(self, sink: Sink) -> End:
        while not isinstance(item := self._fetch.next(), End):
            if isinstance(item, KVSlice):
                self._place(item, sink)
            else:
                sink.logits(item)
        if self._tape.left:
            raise ProtocolError("something follows its end")
        return item

    def _place(self, piece: KVSlice, sink: Sink) -> None:
        if not all(np.isfinite(as_dtype(rows, piece.dtype, "float32")).all() for rows in (piece.keys, piece.values)):
            raise ProtocolError("rows that are no numbers")
        sink.place(piece)
        self._placed[piece.layer] = piece.stop
        if all(stop == piece.stop for stop in self._placed):
            sink.commit(piece.stop)


def _expect(connection: Connection, kind: Kind) -> bytes:
    frame = connection.receive_header()
    if frame.kind is not kind:
        raise ProtocolError(f"a tape with {frame.kind.name} where {kind.name} belongs")
    return connection.receive_message(frame)
