"""Outcomes of finished requests, for counters and the history."""

import time
from collections.abc import Callable

import msgspec

from disaggregated_inference.api import Outcome, RequestRecord
from disaggregated_inference.cluster import Policies
from disaggregated_inference.orchestrator.history import History
from disaggregated_inference.timeouts import HistoryTimeouts


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

    def __init__(self, policies: Policies, timeouts: HistoryTimeouts) -> None:
        self._kept_as = (policies.history, policies.history_file, policies.history_rows, policies.history_days)
        size, file, rows, days = self._kept_as
        self.history = History(size, file, timeouts, rows, days)
        self.counts: dict[Outcome, int] = {"ok": 0, "failed": 0, "refused": 0, "cancelled": 0}
        self.busy = BusyTime()
        self.on_end: list[Callable[[RequestRecord], None]] = []

    def keep(self, record: RequestRecord) -> RequestRecord:
        """Returns it with its number."""
        record = msgspec.structs.replace(record, number=self.history.next_number())
        self.counts[record.outcome] += 1
        self.history.add(record, record.caller)
        for callback in self.on_end:
            callback(record)
        return record

    def move_history(self, new: "Outcomes") -> History:
        """To that of a new config, if it is kept another way. Returns the one that is not needed now."""
        if new._kept_as == self._kept_as:
            return new.history
        new.history.adopt(self.history)
        unneeded, self.history, self._kept_as = self.history, new.history, new._kept_as
        return unneeded


def outcome_of(error: BaseException | None) -> Outcome:
    """A request that is wrong would be so on every node: it is refused, nothing failed."""
    if error is None:
        return "ok"
    if not isinstance(error, Exception):
        return "cancelled"
    return "refused" if 400 <= getattr(error, "status", 500) < 500 else "failed"
