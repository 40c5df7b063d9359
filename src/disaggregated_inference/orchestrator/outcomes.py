"""Outcomes of finished requests, for counters and the history."""

import time
from collections.abc import Callable

from disaggregated_inference.api import Outcome, RequestRecord
from disaggregated_inference.orchestrator.history import History


class BusyTime:
    """The time in which something runs, however much at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._running = clock, 0
        self._past_s = self._since = 0.0

    def began(self) -> None:
        if not self._running:
            self._since = self._clock()
        self._running += 1

    def ended(self) -> None:
        self._running -= 1
        if not self._running:
            self._past_s += self._clock() - self._since

    @property
    def seconds(self) -> float:
        return self._past_s + (self._clock() - self._since if self._running else 0.0)


class Outcomes:
    """Counters, history and callbacks of finished requests; they survive a reload of the config."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.counts: dict[Outcome, int] = {"ok": 0, "failed": 0, "refused": 0, "cancelled": 0}
        self.busy = BusyTime()
        self.on_end: list[Callable[[RequestRecord], None]] = []


def outcome_of(error: BaseException | None) -> Outcome:
    """A request that is wrong would be so on every node: it is refused, nothing failed."""
    if error is None:
        return "ok"
    if not isinstance(error, Exception):
        return "cancelled"
    return "refused" if 400 <= getattr(error, "status", 500) < 500 else "failed"
