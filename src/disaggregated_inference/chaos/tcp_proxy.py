"""A TCP proxy on loopback. Subclasses delay, alter or stop what passes."""

import socket
import threading
from contextlib import suppress

from disaggregated_inference.timeouts import ChaosTimeouts

_FORTH_BYTES, _BACK_BYTES = 1 << 16, 1 << 14


class TcpProxy:
    """Forwards connections to `target`, two threads for each. A subclass replaces `accepts`, `to_target` and
    `to_client` for single pieces, or `pump` and `pump_back` for a whole direction, and may use `lock`. `target` may
    change: new connections go there."""

    def __init__(self, target: tuple[str, int], timeouts: ChaosTimeouts = ChaosTimeouts()) -> None:
        self.target, self._timeouts = target, timeouts
        self._closed = threading.Event()
        self.lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.address: tuple[str, int] = ("127.0.0.1", self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        self._refuse()
        self.hang_up()

    def _refuse(self) -> None:
        """For good."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # closing alone lets a waiting accept take one more
        self._listener.close()

    @property
    def connections(self) -> int:
        """Open ones; each has two sockets."""
        with self.lock:
            return len(self._sockets) // 2

    def hang_up(self) -> None:
        """End all connections; the proxy still accepts new ones."""
        with self.lock:
            open_now = list(self._sockets)
        for sock in open_now:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(near,), name="proxy", daemon=True).start()

    def accepts(self, near: socket.socket) -> bool:
        """Whether a new connection is forwarded; may wait, or reset it."""
        return True

    def _serve(self, near: socket.socket) -> None:
        self._keep(near)
        try:
            if self.accepts(near):
                with socket.create_connection(self.target, self._timeouts.dial_s) as far:
                    far.settimeout(None)
                    self._keep(far)
                    self._forward(near, far)
        except OSError:
            pass  # the target is away: the client sees its connection end
        finally:
            self._drop(near)

    def _forward(self, near: socket.socket, far: socket.socket) -> None:
        for sock in (near, far):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(target=self.pump_back, args=(far, near), name="proxy", daemon=True)
        back.start()
        self.pump(near, far)
        back.join()
        self._drop(far)

    def _keep(self, sock: socket.socket) -> None:
        with self.lock:
            self._sockets.add(sock)
        if self._closed.is_set():
            raise OSError("closed")

    def _drop(self, sock: socket.socket) -> None:
        with self.lock:
            self._sockets.discard(sock)
        sock.close()

    def pump(self, source: socket.socket, target: socket.socket) -> None:
        """Forth. The end of the client's sending is passed on; the answer may still come."""
        with suppress(OSError):
            while data := source.recv(_FORTH_BYTES):
                target.sendall(self.to_target(data))
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def pump_back(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(_BACK_BYTES):
                target.sendall(self.to_client(data))
        for sock in (source, target):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def to_target(self, data: bytes) -> bytes:
        return data

    def to_client(self, data: bytes) -> bytes:
        return data
