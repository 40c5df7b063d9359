"""Where a prefill node takes KV connections: one listener per address, one thread per connection."""

import ipaddress
import logging
import resource
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from disaggregated_inference.errors import BadRequest
from disaggregated_inference.kv_transfer.paths import Address, spoken

log = logging.getLogger(__name__)

_WILDCARDS = ("0.0.0.0", "::", "")


class KVListener:
    """Listens on all `addresses` (port 0: any free one) and calls `serve` with every connection, on its own thread."""

    def __init__(self, addresses: Sequence[Address], serve: Callable[[socket.socket], None], most: int) -> None:
        self._serve = serve
        self._kv_memory = threading.BoundedSemaphore(min(most, _spare_descriptors()))
        self._lock = threading.Lock()
        self._serving = 0
        self._closing = threading.Event()
        self._sockets: list[socket.socket] = []
        try:
            for address in addresses:
                self._sockets.append(listen(address))
        except OSError:
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
        """Wait until nothing is being sent, for so long at most."""
        deadline = time.monotonic() + seconds
        while self._serving and time.monotonic() < deadline:
            time.sleep(0.02)

    def reached_at(self, host: str) -> tuple[Address, ...]:
        """The addresses to hand out; `host` stands in for those that mean every interface."""
        return tuple((host if own in _WILDCARDS and host else own, port) for own, port in self.addresses)

    def _accept(self, listener: socket.socket) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if not self._closing.is_set():  # out of descriptors, most likely: others will be closed
                    log.warning("cannot take KV connections: %s", error)
                    time.sleep(0.1)
                continue
            self._take(sock)

    def _take(self, sock: socket.socket) -> None:
        if not self._kv_memory.acquire(blocking=False):
            sock.close()  # the other side tries its next path
            return
        try:
            threading.Thread(target=self._run, args=(sock,), name="kv-send", daemon=True).start()
        except RuntimeError as error:
            log.warning("no thread for a KV connection: %s", error)
            self._kv_memory.release()
            sock.close()

    def _run(self, sock: socket.socket) -> None:
        with self._lock:
            self._serving += 1
        try:
            self._serve(sock)
        finally:
            with self._lock:
                self._serving -= 1
            self._kv_memory.release()

    def close(self) -> None:
        self._closing.set()
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def _spare_descriptors() -> int:
    """Half of what this process may open: the rest is for HTTP, files and the libraries."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(8, soft // 2) if soft != resource.RLIM_INFINITY else 1 << 16


def listen(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        sock = socket.create_server(address, family=family, backlog=1024)  # a crowd dials at once
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {spoken(address)}: {error.strerror}") from None
    sock.settimeout(0.5)  # how long closing may go unnoticed where a shutdown does not wake an accept
    return sock


def parse_address(text: str, port: int, least_port: int = 1) -> Address:
    """`host`, `host:port`, `v6` or `[v6]:port`; `port` where none is given. Port 0 is for who listens: any free one."""
    host, number = _parted(text)
    if ":" in host and not _is_v6(host):
        raise BadRequest(f"{text!r} is no address: give HOST or HOST:PORT, or [ADDRESS]:PORT for IPv6")
    if number is None:
        return host, port
    if not number.isdecimal() or not least_port <= int(number) <= 65535:
        raise BadRequest(f"{text!r} is no address: give HOST or HOST:PORT")
    return host, int(number)


def _parted(text: str) -> tuple[str, str | None]:
    """Host and port, as they are written; None where there is no port."""
    host, found, number = text.rpartition(":")
    if text.startswith("[") and text.endswith("]"):
        return text[1:-1], None
    if not found or (":" in host and not host.startswith("[")):
        return text, None
    return host.strip("[]"), number


def _is_v6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True
