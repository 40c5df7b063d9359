"""A line between two processes that can be cut, slowed, garbled or black-holed for a while, and heals."""

import random
import socket
import struct
import threading
from typing import Literal

from disaggregated_inference.chaos.tcp_proxy import TcpProxy

LineFault = Literal["cut", "slow", "garble", "black hole"]
LINE_FAULTS: tuple[LineFault, ...] = ("cut", "slow", "garble", "black hole")

_SLOW_S, _SLOW_BYTES_PER_S = 0.02, 400_000.0  # per piece, and for its bytes
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset


class DisturbedLine(TcpProxy):
    """A healthy proxy until `disturb`, and again after `heal`. `struck` counts what the faults hit: connections that
    were cut or refused, pieces that were slowed or held, bits that were flipped.

    After a black hole, held bytes arrive late and in order, as TCP repeats them. `spacing_bytes`: a garbled line flips
    a bit about once in so many bytes, in both directions."""

    def __init__(self, name: str, target: tuple[str, int], seed: int, spacing_bytes: int) -> None:
        self.name, self.struck = name, 0
        self._fault: LineFault | None = None
        self._healed = threading.Event()
        self._healed.set()
        self._random, self._spacing_bytes = random.Random(seed), spacing_bytes
        self._next_flip = 0
        super().__init__(target)

    def disturb(self, fault: LineFault) -> None:
        self._fault, self._next_flip = fault, self._draw_spacing()
        self._healed.clear()
        if fault == "cut":
            self._count(self.connections)
            self.hang_up()

    def heal(self) -> None:
        self._fault = None
        self._healed.set()

    def close(self) -> None:
        self.heal()
        super().close()

    def accepts(self, near: socket.socket) -> bool:
        if self._fault != "cut":
            return True
        self._count()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        return False

    def to_target(self, data: bytes) -> bytes:
        return self._disturbed(data)

    def to_client(self, data: bytes) -> bytes:
        return self._disturbed(data)

    def _disturbed(self, data: bytes) -> bytes:
        if (fault := self._fault) is None:
            return data
        if fault == "garble":
            return self._garbled(data)
        self._count()
        if fault == "slow":
            self._healed.wait(_SLOW_S + len(data) / _SLOW_BYTES_PER_S)
        elif fault == "black hole":
            self._healed.wait()
        return data

    def _garbled(self, data: bytes) -> bytes:
        altered = bytearray(data)
        with self.lock:
            while self._next_flip < len(data):
                altered[self._next_flip] ^= 1 << self._random.randrange(8)
                self.struck += 1
                self._next_flip += self._draw_spacing()
            self._next_flip -= len(data)
        return bytes(altered)

    def _draw_spacing(self) -> int:
        return 1 + int(self._random.expovariate(1 / self._spacing_bytes))

    def _count(self, many: int = 1) -> None:
        with self.lock:
            self.struck += many
