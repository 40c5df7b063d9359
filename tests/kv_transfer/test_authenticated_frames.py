"""The authenticated mode: golden bytes, and that no frame can be altered, left out, repeated or sent back."""

import hashlib
import hmac
import json
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from disaggregated_inference.errors import ChecksumMismatch, DisaggError, PeerGone
from disaggregated_inference.kv_transfer import Connection
from disaggregated_inference.kv_transfer.authenticated_frames import TAG_BYTES, FrameKeys
from disaggregated_inference.kv_transfer.frames import HEADER, KEYED_MAGIC, Frame, Kind, encode_header, peek
from tests.support.kv_frames import tcp_pair

SECRET, RECEIVER, SENDER = "secret", "00" * 16, "11" * 16
ROWS = bytes(range(24))
_GOLDEN = Path(__file__).with_name("golden_keyed_frames.json")


def keyed(sock: socket.socket, side: str) -> Connection:
    """After WELCOME."""
    connection = Connection(sock)
    connection.keys, connection.keyed = FrameKeys(side, SECRET, RECEIVER, SENDER), True  # type: ignore[arg-type]
    return connection


def sent(side: str, send: Callable[[Connection], None], complete: bool = True) -> bytes:
    """What a side writes."""
    with tcp_pair() as (near, far):
        connection = keyed(near, side)
        if not complete:
            connection.keys = FrameKeys(side, SECRET, RECEIVER)  # type: ignore[arg-type]
        send(connection)
        near.shutdown(socket.SHUT_WR)
        tape = bytearray()
        while data := far.recv(1 << 16):
            tape += data
    return bytes(tape)


def send_three(connection: Connection) -> None:
    connection.send(Frame(Kind.SLICE, len(ROWS), 0, 3, 1, 300), ROWS)
    connection.send_message(Kind.ALIVE)
    connection.send_message(Kind.END, b"{}")


def golden_frames() -> dict[str, bytes]:
    return {
        "hello": sent("receiver", lambda each: each.send_message(Kind.HELLO, b"{}"), complete=False),
        "early error": sent("sender", lambda each: each.send_message(Kind.ERROR, b"{}"), complete=False),
        "welcome": sent("sender", lambda each: each.send_message(Kind.WELCOME, b"{}")),
        "renew": sent("receiver", lambda each: each.send_message(Kind.RENEW)),
        "three": sent("sender", send_three),
    }


def test_golden_bytes() -> None:
    assert {name: frame.hex() for name, frame in golden_frames().items()} == json.loads(_GOLDEN.read_text())


def test_the_tag_is_what_the_protocol_says() -> None:
    """By another implementation: HKDF from RFC 5869, GMAC as AES-GCM of an empty text."""

    def key(salt: str, side: str) -> bytes:
        extracted = hmac.digest(bytes.fromhex(salt), SECRET.encode(), "sha256")
        return hmac.digest(extracted, f"disagg kv v1 {side}".encode() + b"\x01", hashlib.sha256)[:16]

    frames = golden_frames()
    for name, salt, side in [
        ("hello", RECEIVER, "receiver"),
        ("early error", RECEIVER, "sender"),
        ("welcome", RECEIVER + SENDER, "sender"),
        ("renew", RECEIVER + SENDER, "receiver"),
    ]:
        body, tag = frames[name][:-TAG_BYTES], frames[name][-TAG_BYTES:]
        assert body[:4] == b"DKVA"
        assert AESGCM(key(salt, side)).encrypt(bytes(12), b"", body) == tag


def read_all(tape: bytes, side: str = "receiver") -> list[Kind]:
    with tcp_pair() as (near, far):
        far.sendall(tape)
        far.shutdown(socket.SHUT_WR)
        connection, kinds = keyed(near, side), []
        for _ in range(3):
            frame = connection.receive_header()
            target = bytearray(frame.size)
            connection.receive_payload(frame, memoryview(target))
            kinds.append(frame.kind)
    return kinds


def split(tape: bytes) -> list[bytes]:
    frames = []
    while tape:
        stop = HEADER.size + struct.unpack_from("<Q", tape, 24)[0] + TAG_BYTES
        frames.append(tape[:stop])
        tape = tape[stop:]
    return frames


def test_frames_as_they_were_sent() -> None:
    assert read_all(sent("sender", send_three)) == [Kind.SLICE, Kind.ALIVE, Kind.END]


def test_no_frame_is_left_out_repeated_reordered_or_sent_back() -> None:
    first, second, third = split(sent("sender", send_three))
    for tape in (second + third, first + third, first + first + second, second + first + third, first + second * 2):
        with pytest.raises(ChecksumMismatch):
            read_all(tape)
    with pytest.raises(ChecksumMismatch):  # to the one who sent it
        read_all(first + second + third, side="sender")


def test_no_bit_can_be_altered() -> None:
    """One of every byte; the header's own check is mended, as an enemy would."""
    tape = sent("sender", send_three)
    first = len(split(tape)[0])
    for at in range(first):
        altered = bytearray(tape)
        altered[at] ^= 1 << at % 8
        if 5 < at < HEADER.size - 4:
            _, _, kind, codec, layer, tokens, start, rest, size, _ = HEADER.unpack(altered[: HEADER.size])
            frame = Frame(Kind(kind), size, codec, layer, tokens, start, rest)
            altered[: HEADER.size] = encode_header(frame, KEYED_MAGIC)
        if 24 <= at < 32:  # a size that the test itself would allocate
            altered[24:32] = struct.pack("<Q", min(struct.unpack_from("<Q", altered, 24)[0], 1000))
        with pytest.raises(DisaggError):
            read_all(bytes(altered))


def test_the_first_bytes_of_a_connection() -> None:
    """They stay to be received. A peer that sends less, byte by byte or never, wakes none, and has one deadline."""
    with tcp_pair() as (near, far):
        for byte in (b"D", b"K", b"V"):
            near.sendall(byte)
        started = time.monotonic()
        with pytest.raises(PeerGone, match="silent for too long"):
            peek(far, 0.2)
        assert time.monotonic() - started > 0.15
        near.sendall(b"AB")
        assert peek(far, 60.0) == KEYED_MAGIC
        assert far.gettimeout() == 5
        assert far.recv(8) == b"DKVAB"
    with tcp_pair() as (near, far):
        near.sendall(b"DK")
        near.shutdown(socket.SHUT_WR)
        with pytest.raises(PeerGone, match="no HELLO"):
            peek(far, 60.0)
