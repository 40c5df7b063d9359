"""Measured speed of this machine, in tokens per second. The router plans with it."""

import math
import threading
from collections import deque
from typing import NamedTuple

from disaggregated_inference.api import Rate

_MAX_BUCKETS = 32
_MIN_SAMPLES, _MAX_SAMPLES = 5, 64  # that an estimate rests on
_MIN_WINDOW_S = 1.0  # of work: more samples where they are shorter, such as decode steps
_MAX_SLOWDOWN = 2.0  # times slower than the next size: the limit of a size's first sample


class _Sample(NamedTuple):
    tokens_per_s: float
    size: int
    seconds: float


class _Bucket:
    """The last samples of one size. The estimate is their median: a frozen process, a closed lid or a busy machine
    makes a sample twenty times slower, and one such sample must not move a plan. A lasting change is followed once
    more than half of the samples show it: after three, or a second."""

    def __init__(self) -> None:
        self._recent: deque[_Sample] = deque(maxlen=_MAX_SAMPLES)
        self.samples = 0

    def record(self, sample: _Sample) -> None:
        self._recent.append(sample)
        self.samples += 1
        while len(self._recent) > _MIN_SAMPLES and self._window_s - self._recent[0].seconds >= _MIN_WINDOW_S:
            self._recent.popleft()

    def rescale(self, factor: float) -> None:
        for index, sample in enumerate(self._recent):
            self._recent[index] = sample._replace(tokens_per_s=sample.tokens_per_s * factor)

    @property
    def _window_s(self) -> float:
        return sum(sample.seconds for sample in self._recent)

    @property
    def middle(self) -> _Sample:
        """By speed. Of two in the middle the faster: samples are slow by accident, seldom fast."""
        return sorted(self._recent)[len(self._recent) // 2]

    @property
    def tokens_per_s(self) -> float:
        return self.middle.tokens_per_s


class RateMeter:
    """Tokens per second by size of the work, in buckets of powers of two, from recent samples."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buckets: dict[int, _Bucket] = {}

    def record(self, size: int, tokens: int, seconds: float) -> None:
        """Work of `size` tokens computed `tokens` in `seconds`."""
        if tokens < 1 or not 0 < seconds < math.inf:
            return
        power = _power(size)
        with self._lock:
            speed = max(tokens / seconds, 0.0 if power in self._buckets else self._slowest(power))
            self._buckets.setdefault(power, _Bucket()).record(_Sample(speed, size, seconds))

    def rescale(self, factor: float) -> None:
        """The machine became so many times faster: what was measured before counts for that."""
        with self._lock:
            for bucket in self._buckets.values():
                bucket.rescale(factor)

    def _slowest(self, power: int) -> float:
        """That the first sample of a size counts for, where a next size is known: larger work is seldom slower, and
        smaller work seldom takes longer."""
        found = self._nearest(power)
        if found is None:
            return 0.0
        return self._buckets[found].tokens_per_s * min(1.0, 2.0 ** (power - found)) / _MAX_SLOWDOWN

    def stats(self) -> list[Rate]:
        """Smallest size first."""
        with self._lock:
            return [
                Rate(
                    size=1 << power,
                    tokens_per_s=bucket.middle.tokens_per_s,
                    samples=bucket.samples,
                    measured_size=bucket.middle.size,
                )
                for power, bucket in sorted(self._buckets.items())
            ]

    def estimate(self, size: int) -> float | None:
        """The rate of the nearest measured size; of two, the smaller size, because larger work is seldom slower."""
        with self._lock:
            found = self._nearest(_power(size))
            return None if found is None else self._buckets[found].tokens_per_s

    def _nearest(self, power: int) -> int | None:
        return min(self._buckets, key=lambda other: (abs(other - power), other), default=None)


def _power(size: int) -> int:
    return min(max(size, 1).bit_length(), _MAX_BUCKETS) - 1
