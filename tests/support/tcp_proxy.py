"""A TCP proxy between two nodes that fails at a chosen byte: it cuts, goes silent or flips a bit."""

import socket
import threading
import time
from contextlib import suppress
from typing import Literal

from disaggregated_inference.chaos.tcp_proxy import TcpProxy

Fault = Literal["none", "cut", "silent", "mute", "mute each", "flip"]


class FaultyProxy(TcpProxy):
    """Forwards connections to `target`. The fault happens once, after `at` bytes to the client over all connections,
    and sets `struck`. After a cut, new connections are refused unless the proxy `heals`. "silent" stops every
    connection, "mute" only the one with the fault, "mute each" every connection after `at` bytes of its own. `pause_s`
    after every 16 KB makes the proxy slow."""

    def __init__(
        self, target: tuple[str, int], fault: Fault = "none", at: int = 0, heals: bool = False, pause_s: float = 0.0
    ) -> None:
        self.fault, self.at, self.heals, self.pause_s = fault, at, heals, pause_s
        self.passed = 0
        self.muted = 0  # connections
        self.last_at = 0.0  # just before the last bytes were passed on, on the clock of time.perf_counter
        self.struck = threading.Event()
        super().__init__(target)

    def __enter__(self) -> "FaultyProxy":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def pump_back(self, source: socket.socket, target: socket.socket) -> None:
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
        with self.lock:
            self.muted += 1
        self.struck.set()
        self._wait_forever()

    def _disturbed(self, data: bytes) -> bytes:
        with self.lock:
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
