"""Paths to other nodes: an address each, and what it has been like to receive over it."""

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import msgspec

from disaggregated_inference.errors import PeerGone
from disaggregated_inference.kv_transfer.frames import Connection

Address = tuple[str, int]

PATIENCE_S = 0.9
SILENCE_S = 0.5  # of a sender, until it is asked; with nothing to say it says so more than twice as often
_ANSWER_S = 0.4  # to that question: a frozen node is known in less than a second
_MOST_ANSWER_S = 2.0
_PATIENCE = 8  # times as long as it took before: a busy machine is slow to everybody, a frozen one mute
_AVOID_S = 10.0
_RECENT_S = 2.0
_MOST_PATHS = 256


def answer_s(greeted_s: float = 0.0) -> float:
    """For a node that took so long to answer a greeting, when it is asked whether it is still there."""
    return min(_MOST_ANSWER_S, max(_ANSWER_S, _PATIENCE * greeted_s))


def spoken(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class PathStats(msgspec.Struct, frozen=True):
    """A path as status pages show it. Goodput is that of recent slices while they were arriving, not of waiting."""

    host: str
    port: int
    goodput_bytes_s: float | None
    payload_bytes: int
    connections: int
    failures: int
    last_error: str | None


class NetworkPath:
    """Any number of connections may use a path at once; the time in which any of them receives counts once."""

    def __init__(self, address: Address, clock: Callable[[], float] = time.perf_counter) -> None:
        self.address, self._clock = address, clock
        self._lock = threading.Lock()
        self._receiving = 0
        self._since = 0.0
        self._recent_bytes = self._recent_s = 0.0
        self._payload_bytes = self._connections = self._failures = 0
        self._failed_at: float | None = None
        self._last_error: str | None = None

    def dial(self, patience_s: float | None = None) -> Connection:
        """A connection on which nothing may take longer than that."""
        patience_s = patience_s or PATIENCE_S
        try:
            sock = socket.create_connection(self.address, timeout=patience_s)
        except (OSError, UnicodeError) as error:
            raise PeerGone(f"{spoken(self.address)} does not answer: {error}") from error
        sock.settimeout(patience_s)
        with self._lock:
            self._connections += 1
        return Connection(sock)

    @contextmanager
    def receiving(self, size: int) -> Iterator[None]:
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
        self._recent_bytes += size
        self._recent_s += now - self._since
        self._since = now
        self._payload_bytes += size
        if self._recent_s > _RECENT_S:  # what was long ago counts less and less
            self._recent_bytes /= 2
            self._recent_s /= 2

    def failed(self, error: Exception) -> None:
        with self._lock:
            self._failures += 1
            self._failed_at, self._last_error = self._clock(), str(error)[:300]

    @property
    def avoided(self) -> bool:
        """It failed a moment ago: others go first."""
        return self._failed_at is not None and self._clock() - self._failed_at < _AVOID_S

    def seen(self) -> PathStats:
        with self._lock:
            goodput = self._recent_bytes / self._recent_s if self._recent_s else None
            counts = (self._payload_bytes, self._connections, self._failures)
            return PathStats(*self.address, goodput, *counts, self._last_error)


class Paths:
    """All paths a node has used, the oldest forgotten when there are too many."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Address, NetworkPath] = {}

    def ordered(self, addresses: Iterable[Address]) -> list[NetworkPath]:
        """In the order given, which is the owner's preference; those that failed a moment ago last."""
        with self._lock:
            paths = [self._known.setdefault((host, port), NetworkPath((host, port))) for host, port in addresses]
            while len(self._known) > _MOST_PATHS:
                del self._known[next(iter(self._known))]
        return sorted(paths, key=lambda path: path.avoided)

    def seen(self) -> list[PathStats]:
        with self._lock:
            return [path.seen() for path in self._known.values()]
