"""A relay between two nodes that alters KV on its way and mends what it can: header checks and checksums."""

import socket
import struct
import threading
from contextlib import suppress

import xxhash

from disaggregated_inference.kv_transfer.authenticated_frames import TAG_BYTES
from disaggregated_inference.kv_transfer.frames import CHECKSUM, HEADER, KEYED_MAGIC, MAGIC, Kind

_OPAQUE_AT = 20_000  # where it alters a stream that it cannot read


class ForgingRelay:
    """Peer checks pass unaltered, where it can tell. `forged` counts altered slices, or bytes of an opaque stream."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target, self.forged, self.secrets_seen = target, 0, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = ("127.0.0.1", self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def __enter__(self) -> "ForgingRelay":
        return self

    def __exit__(self, *_: object) -> None:
        """No connection comes after the listener's thread has ended."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._sockets.append(near)
                far = socket.create_connection(self._target)
                self._sockets.append(far)
                honest = threading.Event()
                threading.Thread(target=self._forward, args=(near, far, honest), daemon=True).start()
                threading.Thread(target=self._forge, args=(far, near, honest), daemon=True).start()

    def _forward(self, near: socket.socket, far: socket.socket, honest: threading.Event) -> None:
        with suppress(OSError):
            while data := near.recv(1 << 16):
                if b'"canary":true' in data:
                    honest.set()
                self.secrets_seen += data.count(b'"secret":"') - data.count(b'"secret":""')
                far.sendall(data)
        with suppress(OSError):
            far.shutdown(socket.SHUT_WR)

    def _forge(self, far: socket.socket, near: socket.socket, honest: threading.Event) -> None:
        with suppress(OSError, EOFError):
            while head := _exactly(far, HEADER.size):
                if head[:4] not in (MAGIC, KEYED_MAGIC):
                    return self._forge_opaque(head, far, near)
                size, keyed = struct.unpack_from("<Q", head, 24)[0], head[:4] == KEYED_MAGIC
                payload = _exactly(far, size)
                trailer = _exactly(far, TAG_BYTES if keyed else CHECKSUM.size)
                if head[5] == Kind.SLICE and not honest.is_set():
                    payload, self.forged = _negated(payload), self.forged + 1
                    if not keyed:
                        trailer = CHECKSUM.pack(xxhash.xxh3_64_intdigest(head + payload))
                near.sendall(head + payload + trailer)
        for sock in (near, far):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _forge_opaque(self, data: bytes, far: socket.socket, near: socket.socket) -> None:
        passed = 0
        while data:
            if passed <= _OPAQUE_AT < passed + len(data):
                at = _OPAQUE_AT - passed
                data, self.forged = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], self.forged + 1
            passed += len(data)
            near.sendall(data)
            data = far.recv(1 << 16)


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        if not (part := sock.recv(size - len(data))):
            raise EOFError
        data += part
    return bytes(data)


def _negated(payload: bytes) -> bytes:
    """Float32 values with the other sign: as large as before, and all wrong."""
    rows = bytearray(payload)
    rows[3::4] = bytes(value ^ 0x80 for value in rows[3::4])
    return bytes(rows)
