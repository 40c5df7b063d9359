"""Frames of the KV transfer, altered at random on the way: an error, or the right rows. Never other rows."""

import socket
import threading
from contextlib import suppress

import numpy as np
import pytest

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
from disaggregated_inference.kv_transfer.frames import CHECKSUM, HEADER, Kind
from tests.support.alterations import altered
from tests.support.kv_frames import message, split_frames, tcp_pair
from tests.support.small_transfer import LAYOUT, MODEL, TOKENS, VOCABULARY, slices

LOGITS = np.arange(VOCABULARY, dtype=np.float32)


def recording() -> bytes:
    outbox = Outbox(range(TOKENS))
    for piece in slices():
        outbox.put(piece)
    outbox.put_logits(LOGITS)
    outbox.finish(End(prompt_tokens=TOKENS))
    welcome = Welcome(epoch="e", prompt_tokens=TOKENS, dtype="float32", codec="raw", chunk_tokens=16)
    return encode_inline(MODEL, welcome, outbox, 1 << 20)


TAPE = recording()
EXPECTED = {(piece.layer, piece.start): piece.keys.tobytes() + piece.values.tobytes() for piece in slices()}


def position_classes(tape: bytes) -> list[tuple[int, int]]:
    """Header, payload and checksum of every frame."""
    found, at = [], 0
    for frame in split_frames(tape):
        payload, end = at + HEADER.size, at + len(frame)
        found += [(at, payload), (payload, end - CHECKSUM.size), (end - CHECKSUM.size, end)]
        at = end
    return [(start, stop) for start, stop in found if stop > start]


class Taken:
    """Fails the test if a row or a logit is not what was sent."""

    def __init__(self) -> None:
        self.rows: set[tuple[int, int]] = set()
        self.sink = Sink(self._place, lambda length: None, self._logits)

    def _place(self, piece: KVSlice) -> None:
        place = piece.layer, piece.start
        assert piece.keys.tobytes() + piece.values.tobytes() == EXPECTED.get(place)
        self.rows.add(place)

    def _logits(self, row: np.ndarray) -> None:
        assert np.array_equal(np.asarray(row).reshape(-1), LOGITS)


def test_inline_frames() -> None:
    refused = 0
    for tape in altered(TAPE, 2500, seed=1, parts=position_classes(TAPE)):
        taken = Taken()
        try:
            InlineReader(tape, MODEL, LAYOUT, VOCABULARY, TOKENS).read_into(taken.sink)
            assert taken.rows == set(EXPECTED)
        except DisaggError:
            refused += 1
    assert refused > 1700


def test_frames_over_a_connection() -> None:
    """As a decode node receives them. What follows the end of the stream is not read."""
    stream, refused = TAPE[len(split_frames(TAPE)[0]) :], 0
    hello = Hello(ticket="t", secret="s", fetch="f", fingerprint=MODEL)
    for sent in altered(stream, 1500, seed=2, parts=position_classes(stream)):
        taken = Taken()
        with tcp_pair() as (near, far):
            feeder = threading.Thread(target=_feed, args=(far, sent))
            feeder.start()
            try:
                fetch_stream(Connection(near), hello, LAYOUT, VOCABULARY, TOKENS, taken.sink.place, taken.sink.logits)
                assert taken.rows == set(EXPECTED)
            except DisaggError:
                refused += 1
            near.close()
            feeder.join()
    assert refused > 1200


def recorded_stream(number: int, streams: int) -> tuple[Hello, bytes]:
    """What a prefill node sends over one of several connections: its parts of each slice."""
    hello = Hello(ticket="t", secret="s", fetch="f", fingerprint=MODEL, stream=number, streams=streams)
    outbox = Outbox(range(TOKENS))
    for piece in slices():
        outbox.put(piece)
    outbox.put_logits(LOGITS)
    outbox.finish(End(prompt_tokens=TOKENS))
    welcome = Welcome(epoch="e", prompt_tokens=TOKENS, dtype="float32", codec="raw", chunk_tokens=16)
    with tcp_pair() as (near, far):
        near.sendall(message(Kind.HELLO, hello) + message(Kind.DONE))
        near.shutdown(socket.SHUT_WR)
        serve(Connection(far), lambda found: (welcome, outbox), min_part_bytes=1)
        return hello, b"".join(iter(lambda: near.recv(1 << 16), b""))


def test_slices_in_parts_over_several_connections() -> None:
    """Each connection's own rows, or an error. What two of them place is in tests/kv_transfer/test_parts.py."""
    whole = {(piece.layer, piece.start): piece for piece in slices()}
    rows = np.concatenate([whole[0, start].keys for start in (0, 16)])  # of layer 0; layer 1 is never parted
    refused, complete, parted = 0, set[tuple[int, int, int]](), False
    for number in range(2):
        hello, stream = recorded_stream(number, 2)
        expected: set[tuple[int, int, int]] | None = None
        for sent in (stream, *altered(stream, 500, seed=7 + number, parts=position_classes(stream))):
            placed: set[tuple[int, int, int]] = set()

            def place(piece: KVSlice, placed: set[tuple[int, int, int]] = placed) -> None:
                if piece.layer == 0:
                    assert np.array_equal(piece.keys, rows[piece.start : piece.stop])
                else:
                    assert np.array_equal(piece.keys, whole[piece.layer, piece.start].keys)
                placed.add((piece.layer, piece.start, piece.stop))

            with tcp_pair() as (near, far):
                feeder = threading.Thread(target=_feed, args=(far, sent))
                feeder.start()
                try:
                    fetch_stream(Connection(near), hello, LAYOUT, VOCABULARY, TOKENS, place, Taken().sink.logits)
                    expected = expected or placed
                    assert placed == expected
                except DisaggError:
                    refused += 1
                near.close()
                feeder.join()
        assert expected
        complete |= expected
        parted = parted or any(layer == 0 and stop - start not in (16, 4) for layer, start, stop in expected)
    assert parted
    assert sorted(at for layer, start, stop in complete if layer == 0 for at in range(start, stop)) == [*range(TOKENS)]
    assert refused > 700


def _feed(sock: socket.socket, content: bytes) -> None:
    with suppress(OSError):
        sock.sendall(content)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass


def test_the_hello_on_its_way_to_the_prefill_node() -> None:
    """The prefill node sees the HELLO that was sent, or none."""
    hello = Hello(ticket="t", secret="s", fetch="f", fingerprint=MODEL, held_tokens=4)
    sent, seen = message(Kind.HELLO, hello), list[Hello]()

    def refuse(found: Hello) -> tuple[Welcome, Outbox]:
        seen.append(found)
        raise TicketRefused("it is only a test")

    for content in altered(sent, 500, seed=3, parts=position_classes(sent)):
        with tcp_pair() as (near, far):
            near.sendall(content)
            near.shutdown(socket.SHUT_WR)
            with pytest.raises(WireError):
                serve(Connection(far), refuse)
    assert all(found == hello for found in seen)
    assert len(seen) < 100, "only what follows the whole frame may be altered"
