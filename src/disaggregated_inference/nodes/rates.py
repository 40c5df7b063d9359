"""What this machine really does: tokens per second, measured at the work itself. Routers plan with it."""

import math
import threading
from dataclasses import dataclass

import msgspec

_HALF_LIFE = 32  # samples after which what was measured counts half
_KEPT = 0.5 ** (1 / _HALF_LIFE)
_MOST_BUCKETS = 32
_KNOWN = 4  # samples after which one that is far slower than all before is a hiccup (a frozen process, a swap)
_SLOWEST = 8.0


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
        """Sums that fade, not rates: so every second of work counts alike, however it was cut into samples. A hiccup
        counts as slow, not as for ever: routers would never come back to measure again."""
        if self.samples >= _KNOWN:
            seconds = min(seconds, _SLOWEST * tokens * self.seconds / self.tokens)
        self.tokens = self.tokens * _KEPT + tokens
        self.seconds = self.seconds * _KEPT + seconds
        self.samples += 1


class Rates:
    """Tokens per second, by size: recent behaviour counts more. Buckets are powers of two."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buckets: dict[int, _Bucket] = {}

    def note(self, size: int, tokens: int, seconds: float) -> None:
        """Work of this size made so many tokens in that time. Where a clock saw no time pass, nothing was learnt."""
        if tokens < 1 or not 0 < seconds < math.inf:
            return
        with self._lock:
            self._buckets.setdefault(_power(size), _Bucket()).note(tokens, seconds)

    def seen(self) -> list[Rate]:
        """Smallest size first."""
        with self._lock:
            return [
                Rate(size=1 << power, tokens_per_s=bucket.tokens / bucket.seconds, samples=bucket.samples)
                for power, bucket in sorted(self._buckets.items())
            ]

    def expect(self, size: int) -> float | None:
        """What to plan with: the nearest size that was seen, of two the smaller: larger work is seldom slower."""
        power = _power(size)
        with self._lock:
            nearest = min(self._buckets, key=lambda other: (abs(other - power), other), default=None)
            return None if nearest is None else self._buckets[nearest].tokens / self._buckets[nearest].seconds


def _power(size: int) -> int:
    return min(max(size, 1).bit_length(), _MOST_BUCKETS) - 1
