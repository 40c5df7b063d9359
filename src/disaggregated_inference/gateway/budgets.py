"""Budgets of API keys: requests at once, requests a minute, tokens a minute and a day.

A request that begins within its budgets may finish. Its tokens are counted when they are known; what goes beyond the
limit of a minute or a day counts in the next one. Counts live in memory: a restart of the gateway forgets them.
"""

import math
import time
from collections.abc import Callable

from disaggregated_inference.errors import (
    ConcurrencyExceeded,
    RateLimited,
    TokensPerDayExceeded,
    TokensPerMinuteExceeded,
)
from disaggregated_inference.gateway.key_file import Key
from disaggregated_inference.timeouts import GatewayTimeouts

Clock = Callable[[], float]

_MINUTE_S, _DAY_S = 60.0, 86400.0


class Bucket:
    """A token bucket: `per_minute` requests a minute, in a burst if need be."""

    def __init__(self, per_minute: float, clock: Clock = time.monotonic) -> None:
        self.per_minute = per_minute
        self.size, self._per_s, self._clock = max(1.0, per_minute), per_minute / 60, clock
        self._left, self._updated_at = self.size, clock()

    def take(self) -> float:
        """Take one. Returns the seconds to wait for it; 0: it was taken."""
        if self.left() < 1:
            return (1 - self._left) / self._per_s
        self._left -= 1
        return 0.0

    def left(self) -> float:
        now = self._clock()
        self._left = min(self.size, self._left + (now - self._updated_at) * self._per_s)
        self._updated_at = now
        return self._left

    def full_s(self) -> float:
        """Seconds until it is full again."""
        return (self.size - self.left()) / self._per_s


class Window:
    """Tokens in a minute or a day. Days begin at midnight UTC: `clock` counts seconds since 1970."""

    def __init__(self, limit: int, period_s: float, clock: Clock = time.time) -> None:
        self.limit, self._period_s, self._clock = limit, period_s, clock
        self._used, self._number = 0, self._current()

    def spend(self, tokens: int) -> None:
        self._roll()
        self._used += tokens

    def left(self) -> int:
        self._roll()
        return max(0, self.limit - self._used)

    def wait_s(self) -> float:
        """Seconds until a request may begin; 0: now."""
        self._roll()
        return self._ends_in_s(self._used // self.limit) if self._used >= self.limit else 0.0

    def reset_s(self) -> float:
        return self._ends_in_s(1)

    def _ends_in_s(self, windows: int) -> float:
        return (self._number + windows) * self._period_s - self._clock()

    def _current(self) -> int:
        return int(self._clock() // self._period_s)

    def _roll(self) -> None:
        passed, self._number = max(0, self._current() - self._number), self._current()
        self._used = max(0, self._used - passed * self.limit)


class Budget:
    """What one key may use, and what it has used. All calls are made on the gateway's loop."""

    def __init__(
        self,
        key: Key,
        monotonic: Clock = time.monotonic,
        clock: Clock = time.time,
        timeouts: GatewayTimeouts = GatewayTimeouts(),
    ) -> None:
        self.name, self.running, self._timeouts = key.name, 0, timeouts
        self._monotonic, self._clock = monotonic, clock
        self._concurrency: int | None = None
        self._requests: Bucket | None = None
        self._minute: Window | None = None
        self._day: Window | None = None
        self.limit_by(key)

    def limit_by(self, key: Key) -> None:
        """The limits of a key file that was read again. What was used stays."""
        self._concurrency = key.concurrency
        if key.per_minute != (self._requests.per_minute if self._requests else None):
            self._requests = Bucket(key.per_minute, self._monotonic) if key.per_minute else None
        self._minute = self._window(self._minute, key.tokens_per_minute, _MINUTE_S)
        self._day = self._window(self._day, key.tokens_per_day, _DAY_S)

    def _window(self, known: Window | None, limit: int | None, period_s: float) -> Window | None:
        if limit is None:
            return None
        window = known or Window(limit, period_s, self._clock)
        window.limit = limit
        return window

    def begin(self) -> None:
        """Count a request, or raise. The caller ends what has begun."""
        whose = f"the key {self.name!r} is limited to"
        if self._concurrency and self.running >= self._concurrency:
            limit = f"{whose} {self._concurrency} requests at once"
            raise ConcurrencyExceeded(limit, self._timeouts.running_hint_s, self.name)
        if self._day and (wait_s := self._day.wait_s()):
            raise TokensPerDayExceeded(f"{whose} {self._day.limit} tokens a day", math.ceil(wait_s), self.name)
        if self._minute and (wait_s := self._minute.wait_s()):
            raise TokensPerMinuteExceeded(f"{whose} {self._minute.limit} tokens a minute", math.ceil(wait_s), self.name)
        if self._requests and (wait_s := self._requests.take()):
            limit = f"{whose} {self._requests.per_minute:g} requests a minute"
            raise RateLimited(limit, math.ceil(wait_s), self.name)
        self.running += 1

    def end(self) -> None:
        self.running -= 1

    def spend(self, tokens: int) -> None:
        for window in (self._minute, self._day):
            if window:
                window.spend(tokens)

    def headers(self) -> dict[str, str]:
        """With OpenAI's names. Of the two windows of tokens, the shorter."""
        found: dict[str, str] = {}
        if bucket := self._requests:
            found |= _headers("requests", bucket.size, bucket.left(), bucket.full_s())
        if window := self._minute or self._day:
            found |= _headers("tokens", window.limit, window.left(), window.reset_s())
        return found


def _headers(kind: str, limit: float, left: float, reset_s: float) -> dict[str, str]:
    values = {"limit": f"{limit:.0f}", "remaining": f"{math.floor(left)}", "reset": f"{max(0, math.ceil(reset_s))}s"}
    return {f"x-ratelimit-{name}-{kind}": value for name, value in values.items()}
