"""Frames: a fixed header of 36 bytes, then raw bytes, then a checksum. No size that the peer claims is allocated.

    offset  size  field
         0     4  magic    b"DKVC"
         4     1  version  1
         5     1  kind     HELLO .. ALIVE
         6     2  codec    of a slice's payload: 0 raw, 1 int8; 0 elsewhere
         8     4  layer    of a slice; 0 elsewhere
        12     4  tokens   rows of a slice or of logprobs; 0 elsewhere
        16     4  start    position of their first row; 0 elsewhere
        20     4  rest     rows of the same slice that follow in frames of other connections; 0 elsewhere
        24     8  size     bytes of payload that follow
        32     4  check    XXH32 of the header so far
        36  size  payload
 36 + size     8  checksum XXH3-64 of everything above

All little endian. A reader decides from the header alone whether it takes the payload, and into which memory. So the
header has its own check: otherwise a flipped bit would look like a peer that violates the protocol. The checksum comes
last so that both sides compute it block by block, while a block is in the processor's cache.

In the authenticated mode (authenticated_frames.py) the magic is b"DKVA", and a keyed tag of 16 bytes takes the
checksum's place. Inside TLS the checksum is 0: each record of TLS has a keyed tag of its own.
"""

import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import xxhash

from disaggregated_inference.errors import Cancelled, ChecksumMismatch, PeerGone, ProtocolError, VersionUnsupported
from disaggregated_inference.kv import Array
from disaggregated_inference.kv_transfer.authenticated_frames import TAG_BYTES, FrameKeys, FrameMac
from disaggregated_inference.kv_transfer.messages import encode_error
from disaggregated_inference.kv_transfer.tls_socket import TlsSocket
from disaggregated_inference.timeouts import TransferTimeouts

MAGIC = b"DKVC"
KEYED_MAGIC = b"DKVA"
VERSION = 1
HEADER = struct.Struct("<4sBBHIIIIQI")
_CHECKED = HEADER.size - 4
CHECKSUM = struct.Struct("<Q")
CONTROL_LIMIT_BYTES = 64 << 10
_BLOCK_BYTES = 512 << 10

Buffer = memoryview | bytes | bytearray


def bytes_of(array: Array) -> memoryview:
    """A contiguous array's own memory, as bytes."""
    return memoryview(array.reshape(-1).view(np.uint8).data)


class Kind(IntEnum):
    HELLO = 1
    WELCOME = 2
    SLICE = 3
    LOGITS = 4
    END = 5
    ERROR = 6
    CANCEL = 7
    RENEW = 8
    DONE = 9
    ALIVE = 10
    TOKENS = 11
    LOGPROBS = 12


class Frame(NamedTuple):
    """A header, without its magic and version."""

    kind: Kind
    size: int
    codec: int = 0
    layer: int = 0
    tokens: int = 0
    start: int = 0
    rest: int = 0


def encode_header(frame: Frame, magic: bytes = MAGIC) -> bytes:
    fields = (frame.kind, frame.codec, frame.layer, frame.tokens, frame.start, frame.rest, frame.size)
    head = HEADER.pack(magic, VERSION, *fields, 0)[:_CHECKED]
    return head + xxhash.xxh32_intdigest(head).to_bytes(4, "little")


def decode_header(raw: Buffer, known: bool = False, expected: bytes = MAGIC) -> Frame:
    """`known`: the peer has sent valid frames before, so an invalid one was damaged in transit."""
    magic, version, kind, codec, layer, tokens, start, rest, size, check = HEADER.unpack(raw)
    damaged = check != xxhash.xxh32_intdigest(bytes(raw[:_CHECKED]))
    if damaged and (known or (magic, version) == (expected, VERSION)):
        raise ChecksumMismatch("a frame's header arrived damaged")
    if magic != expected and magic in (MAGIC, KEYED_MAGIC):
        raise ProtocolError("one node has --kv-security authenticated for this connection, the other has not")
    if magic != expected:
        raise ProtocolError("the peer does not speak this protocol: wrong magic")
    if version != VERSION:
        raise VersionUnsupported(f"the peer speaks version {version}, this node {VERSION}: update the older node")
    if kind not in Kind.__members__.values():
        raise ProtocolError(f"frame kind {kind} is unknown")
    return Frame(Kind(kind), size, codec, layer, tokens, start, rest)


def peek(sock: socket.socket, limit_s: float) -> bytes:
    """The first bytes of a connection, as many as a magic has, without receiving them. Fewer do not wake the thread: a
    peer that sends them one by one costs nothing while it is waited for."""
    timeout_s = sock.gettimeout()
    sock.settimeout(limit_s)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, len(MAGIC))
        begin = sock.recv(len(MAGIC), socket.MSG_PEEK)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
    except OSError as error:
        raise _gone("receiving", error) from error
    finally:
        sock.settimeout(timeout_s)
    if len(begin) < len(MAGIC):
        raise PeerGone("the peer sent no HELLO")
    return begin


class Connection:
    """A socket that carries frames. Any thread may send, one receives."""

    def __init__(self, sock: socket.socket | TlsSocket, timeouts: TransferTimeouts = TransferTimeouts()) -> None:
        self.sock, self.timeouts = sock, timeouts
        self.keys: FrameKeys | None = None  # in the authenticated mode
        self.keyed = False  # whether frames have the magic and the tag of that mode
        self._in_tls = isinstance(sock, TlsSocket)
        self.place = ""  # where it was dialled
        if isinstance(sock, socket.socket) and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._raw = bytearray(HEADER.size)
        self._known = False
        self._checksum = bytearray(CHECKSUM.size)
        self._sending = threading.Lock()  # frames of two threads must not mix
        self.cancelled = False
        self.deadline: float | None = None  # on the monotonic clock; receiving after it fails
        self.keep_waiting: Callable[[], bool] = lambda: False  # called after every timeout of a silent peer
        self.hello_at = 0.0  # when HELLO was sent or received, on the clock of time.perf_counter
        self.handshake_s = 0.0  # time from HELLO to WELCOME
        self.received_at = 0.0  # when the last bytes arrived

    def has_bytes(self) -> bool:
        """Whether bytes wait to be received, or the connection has ended."""
        waiting = select.poll()
        waiting.register(self.sock, select.POLLIN)
        return bool(waiting.poll(0)) or (isinstance(self.sock, TlsSocket) and self.sock.has_bytes())

    @property
    def answered_plainly(self) -> bool:
        """The last header was one of the plain mode."""
        return self._raw[:4] == MAGIC

    def send(self, frame: Frame, *payload: Buffer) -> None:
        """The header goes out with the first block and the checksum with the last: no small packet travels alone."""
        head = encode_header(frame, KEYED_MAGIC if self.keys else MAGIC)
        waiting = [memoryview(head)]
        with self._sending:
            seal = self._seal(self.keys.sending() if self.keys else None, head)
            for block in _blocks(payload):
                seal.update(block)
                waiting.append(block)
                if sum(map(len, waiting)) >= _BLOCK_BYTES:
                    self._drain(waiting)
            self._drain([*waiting, memoryview(seal.trailer())])

    def _drain(self, parts: list[memoryview]) -> None:
        try:
            while parts:
                sent = self.sock.sendmsg(parts)
                while parts and sent >= len(parts[0]):
                    sent -= len(parts.pop(0))
                if sent:
                    parts[0] = parts[0][sent:]
        except OSError as error:
            raise _gone("sending", error) from error

    def send_message(self, kind: Kind, content: bytes = b"") -> None:
        self.send(Frame(kind, len(content)), content)

    def receive_header(self) -> Frame:
        self._fill(memoryview(self._raw))
        frame = decode_header(self._raw, self._known, KEYED_MAGIC if self.keyed else MAGIC)
        self._known = True
        return frame

    def receive_payload(self, frame: Frame, *targets: memoryview) -> None:
        """Into the caller's memory. Sizes and checksum must match."""
        if sum(map(len, targets)) != frame.size:
            raise ProtocolError(f"a {frame.kind.name} frame of {frame.size} bytes, {sum(map(len, targets))} expected")
        seal = self._seal(self.keys.receiving() if self.keys else None, bytes(self._raw))
        for block in _blocks(targets):
            self._fill(block)
            seal.update(block)
        self._require_trailer(seal, frame)

    def _seal(self, mac: FrameMac | None, head: bytes) -> "_Seal":
        return _Seal(mac, None if mac or self._in_tls else xxhash.xxh3_64(), head)

    def _require_trailer(self, seal: "_Seal", frame: Frame) -> None:
        received = self._checksum if not self.keys else bytearray(TAG_BYTES)
        self._fill(memoryview(received))
        if not seal.is_trailer(received):
            raise ChecksumMismatch(f"a {frame.kind.name} frame arrived damaged")

    def receive_unproven(self, frame: Frame, keys_of: Callable[[bytes], FrameKeys]) -> bytes:
        """A control payload that names its own key: `keys_of` finds it, from content that is not proven yet."""
        content = self._read_content(frame, CONTROL_LIMIT_BYTES)
        self.keys = keys_of(bytes(content))
        seal = self._seal(self.keys.receiving(), bytes(self._raw))
        seal.update(content)
        self._require_trailer(seal, frame)
        return bytes(content)

    def _read_content(self, frame: Frame, limit: int) -> bytearray:
        if frame.size > limit:
            raise ProtocolError(f"a {frame.kind.name} frame of {frame.size} bytes; at most {limit} are allowed")
        content = bytearray(frame.size)
        self._fill(memoryview(content))
        return content

    def receive_message(self, frame: Frame, limit: int = CONTROL_LIMIT_BYTES) -> bytes:
        if frame.size > limit:
            raise ProtocolError(f"a {frame.kind.name} frame of {frame.size} bytes; at most {limit} are allowed")
        content = bytearray(frame.size)
        self.receive_payload(frame, memoryview(content))
        return bytes(content)

    def close(self) -> None:
        """Close so that the last frame arrives: closing a socket with unread bytes would discard it."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)
            self.sock.settimeout(self.timeouts.close_s)
            deadline = time.monotonic() + self.timeouts.close_s
            while self.sock.recv(1 << 20) and time.monotonic() < deadline:
                pass
        self.sock.close()

    def cancel(self, error: BaseException) -> None:
        """From any thread of the receiver: send CANCEL, or ERROR with the reason, and wake the thread that receives."""
        with suppress(PeerGone, OSError):
            self.cancelled = True
            if isinstance(error, Cancelled):
                self.send_message(Kind.CANCEL)
            else:
                self.send_message(Kind.ERROR, encode_error(error))
            self.sock.shutdown(socket.SHUT_RD)

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Around all use of a receiver's connection. If it breaks, the sender is not told: another may resume."""
        try:
            yield
        except (PeerGone, ChecksumMismatch):
            if not self.cancelled:
                self.sock.close()
            raise
        finally:
            self.close()

    def _fill(self, target: memoryview) -> None:
        while target:
            if self.deadline and time.monotonic() > self.deadline:
                raise PeerGone("the peer took too long to send its HELLO")
            try:
                count = self.sock.recv_into(target)
                self.received_at = time.monotonic()
            except OSError as error:
                if isinstance(error, TimeoutError) and self.keep_waiting():
                    continue
                raise _gone("receiving", error) from error
            if not count:
                raise PeerGone("the peer closed the connection in the middle of a frame")
            target = target[count:]


class _Seal:
    """What follows a payload: XXH3-64, or the tag of the authenticated mode, or 0."""

    def __init__(self, mac: FrameMac | None, checksum: xxhash.xxh3_64 | None, head: bytes) -> None:
        self._mac, self._checksum = mac, checksum
        summed = mac or checksum
        self.update: Callable[[Buffer], None] = summed.update if summed else _ignore
        self.update(head)

    def trailer(self) -> bytes:
        if self._mac:
            return self._mac.tag()
        return CHECKSUM.pack(self._checksum.intdigest() if self._checksum else 0)

    def is_trailer(self, received: bytes | bytearray) -> bool:
        return self._mac.is_tag(received) if self._mac else received == self.trailer()


def _ignore(block: Buffer) -> None:
    pass


def _blocks(parts: Sequence[Buffer]) -> Iterator[memoryview]:
    for part in parts:
        view = memoryview(part).cast("B")
        for at in range(0, len(view), _BLOCK_BYTES):
            yield view[at : at + _BLOCK_BYTES]


def no_answer(place: str) -> PeerGone:
    return PeerGone(f"{place} does not answer")


def _gone(doing: str, error: OSError) -> PeerGone:
    what = "it was silent for too long" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
    return PeerGone(f"lost the peer while {doing}: {what}")
