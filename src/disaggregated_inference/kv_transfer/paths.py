"""Network paths to other nodes: one KV address each, with its failures and its measured goodput."""

import errno
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from disaggregated_inference.errors import DisaggError, IdentityRefused, PeerGone
from disaggregated_inference.kv_transfer.frames import Connection, no_answer
from disaggregated_inference.kv_transfer.tls_socket import TlsSocket, start_tls
from disaggregated_inference.timeouts import TransferTimeouts

log = logging.getLogger(__name__)

Address = tuple[str, int]

_SLOW_PEER_FACTOR = 8  # a probe may take this many times as long as the handshake: a busy machine answers late
_MAX_PATHS = 256
_CODES = {errno.EHOSTUNREACH: "no_route", errno.ENETUNREACH: "no_network", errno.ECONNREFUSED: "refused"}
# What one slice may add to the time counted, as a share of that time or of the whole average: a line that stalls once
# is not a slow line.
_MAX_SHARE, _SHORT_SHARE = 0.5, 0.05


def format_address(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class TlsPeer:
    """The node that must answer: `require` raises `IdentityRefused` for the certificate of any other."""

    name: str
    context: ssl.SSLContext
    require: Callable[[bytes | None], object]


class NetworkPath:
    """Several connections may use a path at once. Time in which more than one of them receives is counted once."""

    def __init__(
        self,
        address: Address,
        timeouts: TransferTimeouts = TransferTimeouts(),
        clock: Callable[[], float] = time.perf_counter,
        tls: TlsPeer | None = None,
    ) -> None:
        self.address, self.timeouts, self._clock, self._tls = address, timeouts, clock, tls
        self.host, self.port = address
        self._lock = threading.Lock()
        self._receiving = 0
        self._since = 0.0
        self._recent_bytes = self._recent_s = 0.0
        self.payload_bytes = self.connections = self.failures = 0
        self._used_at: float | None = None
        self._failed_at: float | None = None
        self.last_error: str | None = None
        self.last_error_code: str | None = None

    def dial(self, timeout_s: float | None = None) -> Connection:
        """A new connection. `timeout_s` also limits every read and write on it."""
        timeout_s = timeout_s or self.timeouts.dial_s
        try:
            sock = socket.create_connection(self.address, timeout=timeout_s)
        except (OSError, UnicodeError) as error:
            log.info("cannot connect to %s: %s", format_address(self.address), error)
            raise no_answer(format_address(self.address)) from error  # clients need not know which ports are open
        sock.settimeout(timeout_s)
        with self._lock:
            self.connections += 1
        connection = Connection(self._secured(sock, timeout_s), self.timeouts)
        connection.place = format_address(self.address)
        return connection

    def _secured(self, sock: socket.socket, timeout_s: float) -> socket.socket | TlsSocket:
        if not self._tls:
            return sock
        try:
            secured = start_tls(sock, self._tls.context, timeout_s, server=False)
        except PeerGone as error:
            log.warning("%s: %s", format_address(self.address), error)
            raise no_answer(format_address(self.address)) from error
        try:
            self._tls.require(secured.peer_certificate)
        except IdentityRefused as error:
            secured.close()
            log.warning("%s: %s", format_address(self.address), error)
            raise PeerGone(f"{format_address(self.address)} is not {self._tls.name}: {error}") from error
        return secured

    def probe_timeout_s(self, handshake_s: float = 0.0) -> float:
        """How long a probe waits for a node whose last handshake took `handshake_s`."""
        return min(self.timeouts.max_probe_s, max(self.timeouts.probe_s, _SLOW_PEER_FACTOR * handshake_s))

    @contextmanager
    def measure(self, size: int) -> Iterator[None]:
        """Around the arrival of `size` bytes of payload."""
        with self._lock:
            if not self._receiving:
                self._since = self._clock()
            self._receiving += 1
        arrived = 0
        try:
            yield
            arrived = size
        finally:
            with self._lock:
                self._receiving -= 1
                self._count(arrived)

    def _count(self, size: int) -> None:
        now = self._clock()
        seconds, self._since = now - self._since, now
        if self._recent_bytes:
            seconds = min(seconds, max(_MAX_SHARE * self._recent_s, _SHORT_SHARE * self.timeouts.goodput_s))
        self._recent_bytes += size
        self._recent_s += seconds
        self.payload_bytes += size
        self._used_at = now if size else self._used_at
        if self._recent_s > self.timeouts.goodput_s:  # older transfers count less and less
            self._recent_bytes /= 2
            self._recent_s /= 2

    def record_failure(self, error: Exception) -> None:
        with self._lock:
            self.failures += 1
            self._failed_at, self.last_error = self._clock(), str(error)[:300]
            self.last_error_code = failure_code(error)

    @property
    def failed_recently(self) -> bool:
        return self._failed_at is not None and self._clock() - self._failed_at < self.timeouts.avoid_path_s

    @property
    def idle_s(self) -> float | None:
        """Since payload last came this way; None: never."""
        return None if self._used_at is None else self._clock() - self._used_at

    @property
    def goodput_bytes_s(self) -> float | None:
        """Only the time in which slices arrive counts, not the waits between."""
        with self._lock:
            return self._recent_bytes / self._recent_s if self._recent_s else None


def failure_code(error: BaseException) -> str:
    """By what the system said, which an error for clients does not repeat."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, socket.gaierror):
            return "unknown_host"
        if isinstance(cause, TimeoutError):
            return "timeout"
        if isinstance(cause, OSError) and cause.errno in _CODES:
            return _CODES[cause.errno]
        cause = cause.__cause__
    return error.code if isinstance(error, DisaggError) else "failed"


class Paths:
    """All paths that a node has used. The oldest are dropped when there are too many."""

    def __init__(self, timeouts: TransferTimeouts = TransferTimeouts()) -> None:
        self._timeouts = timeouts
        self._lock = threading.Lock()
        self._known: dict[tuple[Address, str], NetworkPath] = {}  # by address and the name of a node with TLS

    def ordered(self, addresses: Iterable[Address], tls: TlsPeer | None = None) -> list[NetworkPath]:
        """In the order given, which is the sender's preference; paths that failed recently come last."""
        with self._lock:
            new = (NetworkPath((host, port), self._timeouts, tls=tls) for host, port in addresses)
            paths = [self._known.setdefault((path.address, tls.name if tls else ""), path) for path in new]
            while len(self._known) > _MAX_PATHS:
                del self._known[next(iter(self._known))]
        return sorted(paths, key=lambda path: path.failed_recently)

    def known(self) -> list[NetworkPath]:
        with self._lock:
            return list(self._known.values())
