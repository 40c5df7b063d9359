"""Accepts the KV connections of a prefill node: one listener per address, one thread per connection."""

import ipaddress
import logging
import resource
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from disaggregated_inference.errors import BadRequest
from disaggregated_inference.http import Unfinished, listen_error
from disaggregated_inference.kv_transfer import Address
from disaggregated_inference.timeouts import NodeTimeouts

log = logging.getLogger(__name__)

_WILDCARDS = ("0.0.0.0", "::", "")
_MAX_UNADMITTED = 512


class _Unadmitted:
    """A connection without an accepted HELLO. It has a descriptor of its own: TLS takes that of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._same = sock.dup()

    def drop(self) -> None:
        with suppress(OSError):
            self._same.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._same.close()


class KVListener:
    """Listens on all `addresses` (port 0: any free port) and calls `serve` for every connection, on a new thread.

    Until `admitted` a connection may be anyone's: half of the places are for those, and each new one beyond drops the
    oldest of them."""

    def __init__(
        self,
        addresses: Sequence[Address],
        serve: Callable[[socket.socket], None],
        limit: int,
        timeouts: NodeTimeouts = NodeTimeouts(),
    ) -> None:
        self._serve, self._timeouts = serve, timeouts
        limit = min(limit, _spare_descriptors())
        self._connections = threading.BoundedSemaphore(limit)
        self._max_unadmitted = min(_MAX_UNADMITTED, max(1, limit // 2))
        self._unfinished = Unfinished(self._max_unadmitted)
        self._unadmitted: dict[socket.socket, _Unadmitted] = {}  # also those that were dropped, until they end
        self._changed = threading.Condition()
        self._serving = 0
        self._closing = threading.Event()
        self._sockets: list[socket.socket] = []
        try:
            for address in addresses:
                self._sockets.append(listen(address, accept_s=timeouts.accept_s))
        except BadRequest:
            self.close()
            raise
        self.addresses: tuple[Address, ...] = tuple(
            (host, sock.getsockname()[1]) for (host, _), sock in zip(addresses, self._sockets, strict=True)
        )
        self._threads = [
            threading.Thread(target=self._accept, args=(sock,), name="kv-accept", daemon=True) for sock in self._sockets
        ]
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    def drain(self, seconds: float) -> None:
        """Wait until no connection is open, at most `seconds`."""
        deadline = time.monotonic() + seconds
        while self._serving and time.monotonic() < deadline:
            time.sleep(self._timeouts.drain_poll_s)

    def addresses_for(self, host: str) -> tuple[Address, ...]:
        """The addresses to give to a client; `host`, where it reached this node, replaces wildcard addresses."""
        return tuple((host if own in _WILDCARDS and host else own, port) for own, port in self.addresses)

    def _accept(self, listener: socket.socket) -> None:
        while not self._closing.is_set():
            try:
                sock, peer = listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if not self._closing.is_set():  # probably out of file descriptors: others will be closed
                    log.warning("cannot accept KV connections: %s", error)
                    time.sleep(self._timeouts.accept_retry_s)
                continue
            self._start(sock, peer[0] if peer else "")

    def _start(self, sock: socket.socket, address: str) -> None:
        if not self._has_place(sock, address):
            self.admitted(sock)
            sock.close()  # the decode node tries its next path
            return
        try:
            threading.Thread(target=self._run, args=(sock,), name="kv-send", daemon=True).start()
        except RuntimeError as error:
            log.warning("cannot start a thread for a KV connection: %s", error)
            self.admitted(sock)
            self._connections.release()
            sock.close()

    def _has_place(self, sock: socket.socket, address: str) -> bool:
        """Waits where too many dropped connections have not ended yet: threads have a limit too."""
        try:
            connection = _Unadmitted(sock)
        except OSError:  # out of file descriptors
            return False
        with self._changed:
            self._unadmitted[sock] = connection
            if oldest := self._unfinished.began(connection, address):
                oldest.drop()
            most = self._max_unadmitted * 5 // 4
            self._changed.wait_for(lambda: len(self._unadmitted) <= most, self._timeouts.dropped_s)
        return self._connections.acquire(blocking=False)

    def admitted(self, sock: socket.socket) -> None:
        """Its peer has proven what it may do, or it has ended: it is not dropped any more."""
        with self._changed:
            if connection := self._unadmitted.pop(sock, None):
                self._unfinished.ended(connection)
                connection.close()
                self._changed.notify_all()

    def _run(self, sock: socket.socket) -> None:
        with self._changed:
            self._serving += 1
        try:
            self._serve(sock)
        finally:
            self.admitted(sock)
            with self._changed:
                self._serving -= 1
            self._connections.release()

    def close(self) -> None:
        self._closing.set()
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def _spare_descriptors() -> int:
    """Half of the file descriptors of this process: the rest is for HTTP, files and libraries."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(8, soft // 2) if soft != resource.RLIM_INFINITY else 1 << 16


def listen(
    address: Address,
    options: tuple[str, str] = ("--kv-port", "--kv-address"),
    accept_s: float = NodeTimeouts().accept_s,
) -> socket.socket:
    """`options`: of the command line, for port and host."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        sock = socket.create_server(address, family=family, backlog=1024)  # many decode nodes may connect at once
    except OSError as error:
        raise listen_error(error, *address, *options) from None
    sock.settimeout(accept_s)
    return sock


def parse_address(text: str, port: int, name: str, min_port: int = 1) -> Address:
    """`host`, `host:port`, `v6` or `[v6]:port`; `port` is the default. `name`: of the option or field that has the
    text. A listener may use port 0: any free port."""
    host, number = _split(text)
    try:
        ipaddress.IPv6Address(host if ":" in host else "::")
    except ValueError:
        message = f"{name}: {text!r} is not an address: give HOST or HOST:PORT, or [ADDRESS]:PORT for IPv6"
        raise BadRequest(message) from None
    if number is None:
        return host, port
    if not number.isdecimal() or not min_port <= int(number) <= 65535:
        raise BadRequest(f"{name}: {text!r} is not an address: give HOST or HOST:PORT")
    return host, int(number)


def _split(text: str) -> tuple[str, str | None]:
    """Host and port as text; None where there is no port."""
    host, found, number = text.rpartition(":")
    if text.startswith("[") and text.endswith("]"):
        return text[1:-1], None
    if not found or (":" in host and not host.startswith("[")):
        return text, None
    return host.strip("[]"), number
