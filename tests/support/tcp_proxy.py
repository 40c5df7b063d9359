"""A TCP line that can be cut, gone silent or noisy at a chosen byte: stands between two nodes."""

import socket
import threading
from contextlib import suppress
from typing import Literal

Fault = Literal["none", "cut", "silent", "mute", "flip"]


class Line:
    """Forwards connections to `target`. The fault strikes once, `at` bytes into what flows back to the dialler (counted
    over all connections); `struck` says that it did. A cut line stays cut unless it `heals`; of a mute one only the
    connection that was struck carries nothing any more; `pause_s` after every 16 KB makes it slow."""

    def __init__(
        self, target: tuple[str, int], fault: Fault = "none", at: int = 0, heals: bool = False, pause_s: float = 0.0
    ) -> None:
        self.target, self.fault, self.at, self.heals, self.pause_s = target, fault, at, heals, pause_s
        self.passed = 0
        self.struck = threading.Event()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = ("127.0.0.1", self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> "Line":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._closed.set()
        self._refuse()
        self._hang_up()
        for sock in self._sockets:
            sock.close()

    def _refuse(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # closing alone lets a waiting accept take one more
        self._listener.close()

    def _hang_up(self) -> None:
        """Those who use the sockets hear of it."""
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._sockets.append(near)
                far = socket.create_connection(self.target)
                self._sockets.append(far)
                threading.Thread(target=self._pump, args=(near, far), daemon=True).start()
                threading.Thread(target=self._pump_back, args=(far, near), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def _pump_back(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 14):
                target.sendall(self._disturbed(data))
                self._closed.wait(self.pause_s)
        for sock in (source, target):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _disturbed(self, data: bytes) -> bytes:
        with self._lock:
            before, self.passed = self.passed, self.passed + len(data)
        if self.fault == "none" or self.struck.is_set() or not before <= self.at < self.passed:
            if self.struck.is_set() and self.fault == "silent":
                self._wait_forever()
            return data
        self.struck.set()
        index = self.at - before
        if self.fault == "flip":
            return data[:index] + bytes([data[index] ^ 0x10]) + data[index + 1 :]
        if self.fault == "mute":
            self._wait_forever()
        if not self.heals:
            self._refuse()
        if self.fault == "silent":
            self._wait_forever()
        self._hang_up()
        raise OSError("cut")

    def _wait_forever(self) -> None:
        """The bytes are gone, the connection is not: as when a cable is pulled."""
        self._closed.wait()
        raise OSError("closed")
