"""TLS on a KV connection. Reads and writes of two threads take turns, because OpenSSL allows one call at a time for a
connection; they never wait inside a call, so neither holds the other up."""

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from disaggregated_inference.errors import PeerGone

Result = TypeVar("Result")

_SMALL_BYTES = 16 << 10  # a TLS record: smaller parts travel together


class TlsSocket:
    """The part of a socket that `Connection` uses."""

    def __init__(self, tls: ssl.SSLSocket, timeout_s: float | None) -> None:
        self._tls, self._timeout_s = tls, timeout_s
        self._calling = threading.Lock()
        tls.setblocking(False)

    @property
    def peer_certificate(self) -> bytes | None:
        return self._tls.getpeercert(binary_form=True)

    def sendmsg(self, parts: list[memoryview]) -> int:
        """Some bytes of the first part; small parts go as one."""
        first = parts[0]
        if len(first) < _SMALL_BYTES and len(parts) > 1:
            first = memoryview(b"".join(_first_bytes(parts, _SMALL_BYTES)))
        return self._call(lambda: self._each_record(self._tls.send, first))

    def recv_into(self, target: memoryview) -> int:
        return self._call(lambda: self._each_record(self._tls.recv_into, target))

    def _each_record(self, move: Callable[[memoryview], int], data: memoryview) -> int:
        """OpenSSL moves one record of 16 KB at a time: as many as go without waiting."""
        moved = 0
        try:
            while moved < len(data):
                if not (count := move(data[moved:])):
                    break
                moved += count
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if not moved:
                raise
        return moved

    def recv(self, size: int) -> bytes:
        return self._call(lambda: self._tls.recv(size))

    def _call(self, operation: Callable[[], Result]) -> Result:
        deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        while True:
            try:
                with self._calling:
                    return operation()
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN, deadline)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT, deadline)

    def _wait(self, event: int, deadline: float | None) -> None:
        waiting = select.poll()
        waiting.register(self._tls, event)
        left_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1e3
        if not waiting.poll(left_ms):
            raise TimeoutError("timed out")

    def has_bytes(self) -> bool:
        with self._calling:
            return self._tls.pending() > 0

    def fileno(self) -> int:
        return self._tls.fileno()

    def settimeout(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s

    def gettimeout(self) -> float | None:
        return self._timeout_s

    def shutdown(self, how: int) -> None:
        socket.socket.shutdown(self._tls, how)  # not SSLSocket's, which would go on in plain text

    def close(self) -> None:
        self._tls.close()


def _first_bytes(parts: list[memoryview], limit: int) -> list[memoryview]:
    found: list[memoryview] = []
    for part in parts:
        if limit <= 0:
            break
        found.append(part[:limit])
        limit -= len(part)
    return found


def start_tls(sock: socket.socket, context: ssl.SSLContext, handshake_s: float, server: bool) -> TlsSocket:
    """The whole handshake has `handshake_s`. The socket is closed if it fails."""
    timeout_s = sock.gettimeout()
    try:
        sock.settimeout(handshake_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tls = context.wrap_socket(sock, server_side=server, do_handshake_on_connect=False)
    except (OSError, ValueError) as error:
        sock.close()
        raise PeerGone(f"the TLS handshake failed: {error}") from error
    try:
        tls.do_handshake()
    except OSError as error:
        tls.close()
        raise PeerGone(f"the TLS handshake failed: {_reason(error)}") from error
    return TlsSocket(tls, timeout_s)


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the peer's certificate is not valid here: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"{error.reason or error}; both nodes need an identity of the same cluster"
    return str(error) or type(error).__name__
