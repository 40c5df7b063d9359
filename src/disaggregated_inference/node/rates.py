"""What this machine really does: tokens per second, measured at the work itself. Routers plan with it."""

import math
import threading
from dataclasses import dataclass

import msgspec

_HALF_LIFE = 32  # samples after which what was measured counts half
_KEPT = 0.5 ** (1 / _HALF_LIFE)
_MOST_BUCKETS = 32
_SLOWEST = 8.0  # times as long as expected; what took longer was a hiccup (a frozen process, a swap, a lid closed)


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """How fast work of `size` to just under twice `size` goes, and from how many measurements that is known."""

    size: int
    tokens_per_s: float
    samples: int


@dataclass(slots=True)
class _Bucket:
    tokens: float = 0.0
    seconds: float = 0.0
    samples: int = 0

    def note(self, tokens: int, seconds: float) -> None:
        """Sums that fade, not rates: so every second of work counts alike, however it was cut into samples."""
        self.tokens = self.tokens * _KEPT + tokens
        self.seconds = self.seconds * _KEPT + seconds
        self.samples += 1

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class RateMeter:
    """Tokens per second, by size: recent behaviour counts more. Buckets are powers of two."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buckets: dict[int, _Bucket] = {}

    def note(self, size: int, tokens: int, seconds: float) -> None:
        """Work of this size made so many tokens in that time. Where a clock saw no time pass, nothing was learnt. A
        hiccup counts as slow, not as for ever: routers would never come back to measure again."""
        if tokens < 1 or not 0 < seconds < math.inf:
            return
        power = _power(size)
        with self._lock:
            if nearest := self._nearest(power):
                seconds = min(seconds, _SLOWEST * tokens / nearest.tokens_per_s)
            self._buckets.setdefault(power, _Bucket()).note(tokens, seconds)

    def seen(self) -> list[Rate]:
        """Smallest size first."""
        with self._lock:
            return [
                Rate(size=1 << power, tokens_per_s=bucket.tokens_per_s, samples=bucket.samples)
                for power, bucket in sorted(self._buckets.items())
            ]

    def expect(self, size: int) -> float | None:
        """What to plan with: the nearest size that was seen, of two the smaller: larger work is seldom slower."""
        with self._lock:
            nearest = self._nearest(_power(size))
            return nearest.tokens_per_s if nearest else None

    def _nearest(self, power: int) -> _Bucket | None:
        found = min(self._buckets, key=lambda other: (abs(other - power), other), default=None)
        return None if found is None else self._buckets[found]


def _power(size: int) -> int:
    return min(max(size, 1).bit_length(), _MOST_BUCKETS) - 1
