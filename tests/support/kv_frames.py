"""Frames of the KV transfer protocol as bytes, and a TCP connection to send them over."""

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import xxhash

from disaggregated_inference.kv_transfer.frames import CHECKSUM, HEADER, Frame, Kind, encode_header


@contextmanager
def tcp_pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a real TCP connection on loopback, with a time limit on every call."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    for end in (near, far):
        end.settimeout(5)
    try:
        yield near, far
    finally:
        near.close()
        far.close()


def encode(frame: Frame, content: bytes = b"") -> bytes:
    """A complete frame."""
    head = encode_header(frame)
    return head + content + CHECKSUM.pack(xxhash.xxh3_64_intdigest(head + content))


def message(kind: Kind, content: msgspec.Struct | None = None) -> bytes:
    payload = msgspec.json.encode(content) if content is not None else b""
    return encode(Frame(kind, len(payload)), payload)


def split_frames(tape: bytes) -> list[bytes]:
    frames, at = [], 0
    while at < len(tape):
        size = struct.unpack_from("<Q", tape, at + 24)[0]
        stop = at + HEADER.size + size + CHECKSUM.size
        frames.append(tape[at:stop])
        at = stop
    return frames
