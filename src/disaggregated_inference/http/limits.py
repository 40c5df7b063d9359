"""Limits on what clients may hold open at once: connections, unfinished request heads, unfinished request bodies.

They hold before any token or key was checked, so that a client without one cannot shut a server off.
"""

import logging
import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import msgspec

from disaggregated_inference.errors import ServerBusy

log = logging.getLogger(__name__)

_OTHER_FILES = 256  # descriptors for connections to nodes, KV transfers, logs and models
_MOST_FILES = 65_536


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Of one server (package `http`)."""

    connections: int = 4096
    connections_per_address: int = 2048  # a reverse proxy is one address
    unfinished_heads: int = 512  # and TLS handshakes; when one more comes, the oldest is closed
    unfinished_body_bytes: int = 128 << 20  # of all request bodies that have not arrived completely


class Closable(Protocol):
    def drop(self) -> None: ...


class Unfinished:
    """Connections from which no complete request has come yet. When one more comes than there may be, the oldest is
    dropped: of the same address, where that one has three quarters of the places."""

    def __init__(self, limit: int) -> None:
        self._limit, self._limit_per_address = limit, max(1, limit * 3 // 4)
        self._addresses: dict[Closable, str] = {}  # in the order in which they began
        self._by_address: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._addresses)

    def began(self, connection: Closable, address: str) -> Closable | None:
        """Returns the one to drop; it is in the list no more."""
        self._addresses[connection] = address
        self._by_address[address] += 1
        if self._by_address[address] > self._limit_per_address:
            oldest = next(one for one, place in self._addresses.items() if place == address)
        elif len(self) > self._limit:
            oldest = next(iter(self._addresses))
        else:
            return None
        self.ended(oldest)
        return oldest

    def ended(self, connection: Closable) -> None:
        address = self._addresses.pop(connection, None)
        if address is not None:
            _count_down(self._by_address, address)


class Connections:
    """The connections of one server. Where one more comes than there may be, the one that has been idle for longest is
    dropped; if none is idle, the new one is refused."""

    def __init__(self, limits: HttpLimits = HttpLimits()) -> None:
        self._limits = limits
        self._by_address: Counter[str] = Counter()
        self._unfinished = Unfinished(limits.unfinished_heads)
        self._idle: dict[Closable, str] = {}  # kept after a response, in the order in which they became idle

    def __len__(self) -> int:
        return self._by_address.total()

    def opened(self, address: str) -> str:
        """Counts a connection. Returns the reason if there are too many."""
        self._by_address[address] += 1
        if self._by_address[address] > self._limits.connections_per_address and not self._drop_idle(address):
            return f"{address} holds {self._limits.connections_per_address} connections already"
        if len(self) > self._limits.connections and not self._drop_idle():
            return f"all {self._limits.connections} connections of this server are in use"
        return ""

    def _drop_idle(self, address: str | None = None) -> bool:
        """The oldest idle one, of one address or of any. It is counted until it has really ended."""
        oldest = next((one for one, place in self._idle.items() if address in (None, place)), None)
        if oldest is None:
            return False
        self.idle_ended(oldest)
        oldest.drop()
        return True

    def idle_began(self, connection: Closable, address: str) -> None:
        self._idle[connection] = address

    def idle_ended(self, connection: Closable) -> None:
        self._idle.pop(connection, None)

    def closed(self, address: str) -> None:
        _count_down(self._by_address, address)

    def head_began(self, connection: Closable, address: str) -> None:
        if oldest := self._unfinished.began(connection, address):
            oldest.drop()

    def head_ended(self, connection: Closable) -> None:
        self._unfinished.ended(connection)


def _count_down(counts: Counter[str], address: str) -> None:
    counts[address] -= 1
    if not counts[address]:
        del counts[address]


class UnfinishedBodies:
    """The bytes of request bodies that have not arrived completely."""

    def __init__(self, limits: HttpLimits = HttpLimits()) -> None:
        self._limit_bytes, self.held_bytes = limits.unfinished_body_bytes, 0

    @contextmanager
    def receiving(self, body: bytearray) -> Iterator[None]:
        """Around one body. The bytes that `add` counted for it are free again at the end."""
        try:
            yield
        finally:
            self.held_bytes -= len(body)

    def add(self, body: bytearray, part: bytes) -> None:
        body += part
        self.held_bytes += len(part)
        if self.held_bytes > self._limit_bytes:
            raise ServerBusy(
                f"unfinished request bodies hold {self._limit_bytes} bytes already: send the request again later"
            )


def within_file_limit(limits: HttpLimits) -> HttpLimits:
    """As many connections as there are file descriptors for. Unfinished heads get half of them at most."""
    files = raise_file_limit()
    return msgspec.structs.replace(
        limits, connections=min(limits.connections, files), unfinished_heads=min(limits.unfinished_heads, files // 2)
    )


def raise_file_limit() -> int:
    """The file descriptors of this process, as many as the system allows. Returns how many connections they are for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (OSError, ValueError) as error:
            log.info("the limit of open files stays at %d: %s", soft, error)
    return max(64, (_MOST_FILES if soft == resource.RLIM_INFINITY else soft) - _OTHER_FILES)
