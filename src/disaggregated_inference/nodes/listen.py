"""Where a prefill node takes KV connections: one listener per address, one thread per connection."""

import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from disaggregated_inference.errors import BadRequest
from disaggregated_inference.wire.paths import Address, spoken

_WILDCARDS = ("0.0.0.0", "::", "")


class Listener:
    """Listens on all `addresses` (port 0: any free one) and calls `serve` with every connection, on its own thread."""

    def __init__(self, addresses: Sequence[Address], serve: Callable[[socket.socket], None], most: int) -> None:
        self._serve = serve
        self._room = threading.BoundedSemaphore(most)
        self._closing = threading.Event()
        self._sockets: list[socket.socket] = []
        try:
            for address in addresses:
                self._sockets.append(_listen(address))
        except OSError:
            self.close()
            raise
        self.addresses: tuple[Address, ...] = tuple(
            (host, sock.getsockname()[1]) for (host, _), sock in zip(addresses, self._sockets, strict=True)
        )
        for sock in self._sockets:
            threading.Thread(target=self._accept, args=(sock,), name="kv-accept", daemon=True).start()

    def reached_at(self, host: str) -> tuple[Address, ...]:
        """The addresses to hand out; `host` stands in for those that mean every interface."""
        return tuple((host if own in _WILDCARDS and host else own, port) for own, port in self.addresses)

    def _accept(self, listener: socket.socket) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            if self._room.acquire(blocking=False):
                threading.Thread(target=self._run, args=(sock,), name="kv-send", daemon=True).start()
            else:
                sock.close()  # the other side tries its next path

    def _run(self, sock: socket.socket) -> None:
        try:
            self._serve(sock)
        finally:
            self._room.release()

    def close(self) -> None:
        self._closing.set()
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def _listen(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        sock = socket.create_server(address, family=family)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen for KV connections on {spoken(address)}: {error.strerror}") from None
    sock.settimeout(0.5)  # how long closing may go unnoticed where a shutdown does not wake an accept
    return sock


def parse_address(text: str, port: int) -> Address:
    """`host`, `host:port` or `[v6]:port`; `port` where none is given."""
    host, found, number = text.rpartition(":")
    if text.startswith("[") and text.endswith("]"):
        return text[1:-1], port
    if not found or (":" in host and not host.startswith("[")):
        return text, port
    if not number.isdigit() or int(number) > 65535:
        raise BadRequest(f"{text!r} is no address: give HOST or HOST:PORT")
    return host.strip("[]"), int(number)
