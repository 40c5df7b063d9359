"""When the slices of one fetch arrived: the seconds on the wire, without the seconds in which nothing came."""

import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Arrivals:
    """Several connections may receive at once: that time counts once."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._receiving = 0
        self._edges = array("d")  # start, end, start, end

    @contextmanager
    def one(self) -> Iterator[None]:
        """Around the arrival of one slice."""
        with self._lock:
            if not self._receiving:
                self._edges.append(self._clock())
            self._receiving += 1
        try:
            yield
        finally:
            with self._lock:
                self._receiving -= 1
                if not self._receiving:
                    self._edges.append(self._clock())

    @property
    def began_at(self) -> float | None:
        """None: nothing arrived."""
        return self._edges[0] if self._edges else None

    def seconds(self, until: float = float("inf")) -> float:
        """In which a slice was arriving, up to a moment. Call it when the fetch has ended."""
        spans = zip(self._edges[::2], self._edges[1::2], strict=False)
        return sum(max(0.0, min(end, until) - start) for start, end in spans)
