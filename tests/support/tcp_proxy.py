"""A TCP proxy between two nodes that fails at a chosen byte: it cuts, goes silent or flips a bit."""

import socket
import threading
import time
from contextlib import suppress
from typing import Literal

Fault = Literal["none", "cut", "silent", "mute", "mute each", "flip"]


class FaultyProxy:
    """Forwards connections to `target`. The fault happens once, after `at` bytes to the client over all connections,
    and sets `struck`. After a cut, new connections are refused unless the proxy `heals`. "silent" stops every
    connection, "mute" only the one with the fault, "mute each" every connection after `at` bytes of its own. `pause_s`
    after every 16 KB makes the proxy slow."""

    def __init__(
        self, target: tuple[str, int], fault: Fault = "none", at: int = 0, heals: bool = False, pause_s: float = 0.0
    ) -> None:
        self.target, self.fault, self.at, self.heals, self.pause_s = target, fault, at, heals, pause_s
        self.passed = 0
        self.muted = 0  # connections
        self.last_at = 0.0  # just before the last bytes were passed on, on the clock of time.perf_counter
        self.struck = threading.Event()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = ("127.0.0.1", self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> "FaultyProxy":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._closed.set()
        self._refuse()
        self.hang_up()
        for sock in self._sockets:
            sock.close()

    def _refuse(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # closing alone lets a waiting accept take one more
        self._listener.close()

    def hang_up(self) -> None:
        """End all connections; the proxy still accepts new ones."""
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
        passed = 0
        with suppress(OSError):
            while data := source.recv(1 << 14):
                passed += len(data)
                if self.fault == "mute each" and passed > self.at:
                    self._mute()
                disturbed, self.last_at = self._disturbed(data), time.perf_counter()
                target.sendall(disturbed)
                self._closed.wait(self.pause_s)
        for sock in (source, target):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _mute(self) -> None:
        with self._lock:
            self.muted += 1
        self.struck.set()
        self._wait_forever()

    def _disturbed(self, data: bytes) -> bytes:
        with self._lock:
            before, self.passed = self.passed, self.passed + len(data)
        if self.fault in ("none", "mute each") or self.struck.is_set() or not before <= self.at < self.passed:
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
        self.hang_up()
        raise OSError("cut")

    def _wait_forever(self) -> None:
        """No byte arrives and the connection stays open, as after a pulled cable."""
        self._closed.wait()
        raise OSError("closed")
