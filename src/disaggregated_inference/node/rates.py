"""Measured speed of this machine, in tokens per second. The router plans with it."""

import math
import threading
from dataclasses import dataclass

from disaggregated_inference.api import Rate

_HALF_LIFE = 32  # samples after which a measurement counts half
_DECAY = 0.5 ** (1 / _HALF_LIFE)
_MAX_BUCKETS = 32
_MAX_SLOWDOWN = 8.0  # times the expected duration; a longer one is an interruption (a frozen process, a closed lid)


@dataclass(slots=True)
class _Bucket:
    tokens: float = 0.0
    seconds: float = 0.0
    samples: int = 0

    def record(self, tokens: int, seconds: float) -> None:
        """Decaying sums, not averages of rates: every second of work has the same weight."""
        self.tokens = self.tokens * _DECAY + tokens
        self.seconds = self.seconds * _DECAY + seconds
        self.samples += 1

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class RateMeter:
    """Tokens per second by size of the work, in buckets of powers of two. Recent samples count more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buckets: dict[int, _Bucket] = {}

    def record(self, size: int, tokens: int, seconds: float) -> None:
        """Work of `size` tokens computed `tokens` in `seconds`. An interruption is limited to `_MAX_SLOWDOWN`: else
        the router would never send work again, and the node never measure again."""
        if tokens < 1 or not 0 < seconds < math.inf:
            return
        power = _power(size)
        with self._lock:
            if nearest := self._nearest(power):
                seconds = min(seconds, _MAX_SLOWDOWN * tokens / nearest.tokens_per_s)
            self._buckets.setdefault(power, _Bucket()).record(tokens, seconds)

    def stats(self) -> list[Rate]:
        """Smallest size first."""
        with self._lock:
            return [
                Rate(size=1 << power, tokens_per_s=bucket.tokens_per_s, samples=bucket.samples)
                for power, bucket in sorted(self._buckets.items())
            ]

    def estimate(self, size: int) -> float | None:
        """The rate of the nearest measured size; of two, the smaller size, because larger work is seldom slower."""
        with self._lock:
            nearest = self._nearest(_power(size))
            return nearest.tokens_per_s if nearest else None

    def _nearest(self, power: int) -> _Bucket | None:
        found = min(self._buckets, key=lambda other: (abs(other - power), other), default=None)
        return None if found is None else self._buckets[found]


def _power(size: int) -> int:
    return min(max(size, 1).bit_length(), _MAX_BUCKETS) - 1
