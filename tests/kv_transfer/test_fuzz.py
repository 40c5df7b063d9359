"""Whatever a stranger sends: a typed error or the right cache, no crash, no hang, no memory by what it claims.

`make fuzz` runs these for longer (DISAGG_FUZZ_EXAMPLES).
"""

import os
import socket
import struct
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disaggregated_inference.errors import DisaggError, TicketRefused, WireError
from disaggregated_inference.kv import KVSlice
from disaggregated_inference.kv_transfer import (
    Connection,
    End,
    Hello,
    InlineReader,
    Outbox,
    Sink,
    Welcome,
    encode_inline,
    fetch_stream,
    serve,
)
from disaggregated_inference.kv_transfer.frames import CHECKSUM, HEADER, Frame, Kind
from disaggregated_inference.node.context import PrefillContext
from tests.support.kv_frames import encode, message, split_frames, tcp_pair
from tests.support.small_transfer import LAYOUT, MODEL, TOKENS, VOCABULARY, slices

EXAMPLES = int(os.environ.get("DISAGG_FUZZ_EXAMPLES", "150"))


def _recording() -> bytes:
    outbox = Outbox(range(TOKENS))
    for piece in slices():
        outbox.put(piece)
    outbox.put_logits(np.zeros(VOCABULARY, np.float32))
    outbox.finish(End(prompt_tokens=TOKENS))
    welcome = Welcome(epoch="e", prompt_tokens=TOKENS, dtype="float32", codec="raw", chunk_tokens=16)
    return encode_inline(MODEL, welcome, outbox, 1 << 20)


TAPE = _recording()
FRAMES = split_frames(TAPE)
_HUGE = [0, 1, 255, 1 << 16, (1 << 31) - 1, 1 << 32, (1 << 63) - 1, (1 << 64) - 1]


@st.composite
def mangled(draw: st.DrawFn) -> bytes:
    """A valid tape with frames dropped, doubled and moved, numbers blown up, bits flipped, ends cut off."""
    frames = list(FRAMES)
    for _ in range(draw(st.integers(0, 3))):
        how = draw(st.sampled_from(["drop", "double", "move", "field", "flip", "lie"]))
        at = draw(st.integers(0, max(len(frames) - 1, 0)))
        if not frames:
            break
        if how == "drop":
            del frames[at]
        elif how == "double":
            frames.insert(at, frames[at])
        elif how == "move":
            frames.insert(draw(st.integers(0, len(frames) - 1)), frames.pop(at))
        else:
            frames[at] = _touched(frames[at], how, draw)
    content = b"".join(frames)
    return content[: draw(st.integers(0, len(content)))] if draw(st.booleans()) else content


def _touched(frame: bytes, how: str, draw: st.DrawFn) -> bytes:
    head, payload = bytearray(frame[: HEADER.size]), bytearray(frame[HEADER.size : -CHECKSUM.size])
    if how == "flip":
        both = bytearray(frame)
        both[draw(st.integers(0, len(both) - 1))] ^= 1 << draw(st.integers(0, 7))
        return bytes(both)
    kind, codec, layer, tokens, start, rest, size = struct.unpack_from("<BHIIIIQ", head, 5)
    values = {"codec": codec, "layer": layer, "tokens": tokens, "start": start, "rest": rest, "size": size}
    name = draw(st.sampled_from([*values, "payload"] if how == "lie" else list(values)))
    if name == "payload":
        payload[:] = draw(st.binary(max_size=400))
        values["size"] = len(payload)
    else:
        width = {"codec": 16, "size": 64}.get(name, 32)
        values[name] = draw(st.sampled_from(_HUGE)) % (1 << width)
    made = Frame(Kind(kind) if kind in list(Kind) else Kind.HELLO, **values)
    return encode(made, bytes(payload))  # the checksum is right: only the numbers lie


class _Taken:
    """Keeps what arrives, and says whether it is the whole and right cache."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], bytes] = {}
        self.logits = 0
        self.sink = Sink(self._place, lambda length: None, self._logits)

    def _place(self, piece: KVSlice) -> None:
        self.rows[piece.layer, piece.start] = piece.keys.tobytes() + piece.values.tobytes()

    def _logits(self, row: object) -> None:
        self.logits += 1

    def honest(self) -> bool:
        """Nothing outside the cache's own bounds. (A lie with a right checksum may change rows: a peer that can do that
        can send rows of its own.)"""
        return self.logits <= 1 and all(
            layer < 2 and start < TOKENS and len(data) <= 16 * 64 for (layer, start), data in self.rows.items()
        )


@contextmanager
def bounded_memory(limit_bytes: int = 4 << 20) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit_bytes
    finally:
        tracemalloc.stop()


@settings(max_examples=EXAMPLES, deadline=None)
@given(mangled())
def test_the_receiver(content: bytes) -> None:
    """A sender that says anything at all, after having been asked politely."""
    taken = _Taken()
    hello = Hello(ticket="t", secret="s", fetch="f", fingerprint=MODEL)
    answer = content[len(FRAMES[0]) :] if content.startswith(FRAMES[0]) else content
    with tcp_pair() as (near, far), bounded_memory():
        near.settimeout(2)
        feeder = threading.Thread(target=_feed, args=(far, answer))
        feeder.start()
        with suppress(DisaggError):
            fetch_stream(Connection(near), hello, LAYOUT, VOCABULARY, TOKENS, taken.sink.place, taken.sink.logits)
        feeder.join()
    assert taken.honest()


def _feed(sock: socket.socket, content: bytes) -> None:
    with suppress(OSError):
        sock.sendall(content)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass


@settings(max_examples=EXAMPLES, deadline=None)
@given(mangled())
def test_the_tape(content: bytes) -> None:
    taken = _Taken()
    with bounded_memory(), suppress(DisaggError):
        InlineReader(content, MODEL, LAYOUT, VOCABULARY, TOKENS).read_into(taken.sink)
    assert taken.honest()


def test_the_unharmed_tape_is_whole() -> None:
    taken = _Taken()
    end = InlineReader(TAPE, MODEL, LAYOUT, VOCABULARY, TOKENS).read_into(taken.sink)
    assert end.prompt_tokens == TOKENS
    assert taken.logits == 1
    expected = {(p.layer, p.start): p.keys.tobytes() + p.values.tobytes() for p in slices()}
    assert taken.rows == expected


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.binary(max_size=300), st.sampled_from(["noise", "valid hello, noise", "framed noise"]), st.integers(0, 12))
def test_the_sender(noise: bytes, how: str, kind: int) -> None:
    """A receiver that says anything at all."""

    def refuse(hello: Hello) -> tuple[Welcome, Outbox]:
        raise TicketRefused("you are unknown")

    framed = bytearray(encode(Frame(Kind.HELLO, len(noise)), noise))
    framed[5] = kind
    sent = {"noise": noise, "valid hello, noise": message(Kind.HELLO) + noise, "framed noise": bytes(framed)}[how]
    with tcp_pair() as (near, far):
        near.sendall(sent)
        near.shutdown(socket.SHUT_WR)
        with pytest.raises(WireError):
            serve(Connection(far), refuse)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.dictionaries(st.text(), inner))
)
@pytest.mark.slow
def test_the_handshake(content: object) -> None:
    """JSON of any shape where HELLO belongs: never admitted, never a crash."""
    with tcp_pair() as (near, far):
        near.sendall(message_of(msgspec.json.encode(content)))
        near.shutdown(socket.SHUT_WR)
        with pytest.raises(WireError):
            serve(Connection(far), lambda hello: pytest.fail("admitted"))


def message_of(payload: bytes) -> bytes:
    return encode(Frame(Kind.HELLO, len(payload)), payload)


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.text(max_size=300))
def test_the_context(word: str) -> None:
    with pytest.raises(TicketRefused):
        PrefillContext.decode(word)


@pytest.mark.parametrize("where", ["rows", "logits"])
def test_what_is_no_number_is_refused(where: str) -> None:
    outbox = Outbox(range(TOKENS))
    for piece in slices():
        keys = piece.keys.copy()
        keys[0] = np.nan if where == "rows" else 0
        outbox.put(KVSlice(piece.layer, piece.start, "float32", keys, piece.values))
    outbox.put_logits(np.full(VOCABULARY, np.nan if where == "logits" else 0, np.float32))
    outbox.finish(End(prompt_tokens=TOKENS))
    welcome = Welcome(epoch="e", prompt_tokens=TOKENS, dtype="float32", codec="raw", chunk_tokens=16)
    content = encode_inline(MODEL, welcome, outbox, 1 << 20)
    with pytest.raises(WireError, match="NaN or infinity"):
        InlineReader(content, MODEL, LAYOUT, VOCABULARY, TOKENS).read_into(_Taken().sink)
