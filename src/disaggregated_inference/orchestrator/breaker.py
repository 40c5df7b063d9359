"""The circuit breaker of a node: it opens when the node fails, and closes when one trial request succeeds."""

import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from disaggregated_inference.timeouts import BreakerTimeouts

CircuitState = Literal["closed", "open", "half_open"]

_COLD = 0.2  # a node that just came back gets a fifth of its share at once, or it would never be tried


class Breaker:
    """Closed: requests pass. Open: no request passes. Half open: one trial request at a time passes."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        soft_failures: int = 3,
        timeouts: BreakerTimeouts = BreakerTimeouts(),
    ) -> None:
        self.reason = ""  # of the last failure; empty after a success
        self._clock, self._timeouts = clock, timeouts
        self._open_s = timeouts.first_open_s
        self._soft_at: deque[float] = deque(maxlen=soft_failures)
        self._retry_at: float | None = None
        self._probe_until: float | None = None
        self._warm_from: float | None = None

    @property
    def state(self) -> CircuitState:
        if self._retry_at is None:
            return "closed"
        return "open" if self._clock() < self._retry_at else "half_open"

    @property
    def retry_at(self) -> float | None:
        """When an open circuit lets the next probe through; None when closed."""
        return self._retry_at

    @property
    def ready(self) -> bool:
        """What `allows` would return, without taking the trial: for the router."""
        return self.state == "closed" or (self.state == "half_open" and not self._is_probing())

    def allows(self) -> bool:
        """Whether a request may go there now. A request that was let through reports `failed` or `succeeded`. A trial
        that never reports expires, or a cancelled request would keep the circuit open."""
        if not self.ready:
            return False
        if self._retry_at is not None:
            self._probe_until = self._clock() + self._timeouts.trial_s
        return True

    def released(self) -> None:
        """The trial ended without a result: the next request may try."""
        self._probe_until = None

    def failed(self, reason: str, *, hard: bool = False) -> None:
        """Hard: the node is gone (refused, reset, frozen); one failure opens the circuit. Soft: the request may be the
        cause; several failures open it."""
        self.reason = reason
        state = self.state
        if state == "half_open":
            self._open(min(self._open_s * 2, self._timeouts.longest_open_s))
        elif state == "closed" and (hard or self._too_many_failures()):
            self._open(self._timeouts.first_open_s)
        # Open already: requests that ran there together fail together: this failure adds nothing.

    def succeeded(self) -> None:
        """Closes a half-open circuit. Not an open one: old output of a frozen node may still arrive."""
        if self.state == "open":
            return
        self.reason = ""
        if self._retry_at is not None:
            self._retry_at = self._probe_until = None
            self._open_s, self._warm_from = self._timeouts.first_open_s, self._clock()

    def renewed(self) -> None:
        """The node was restarted: failures of the old process do not count. An open circuit lets a trial through at
        once, but only one: a process may keep restarting."""
        self._soft_at.clear()
        self._warm_from = self._clock()
        if self._retry_at is not None:
            self._retry_at, self._probe_until = min(self._retry_at, self._clock()), None

    def warmth(self) -> float:
        """0.2 to 1: the share of work for a node that just came back."""
        if self._warm_from is None:
            return 1.0
        return min(1.0, _COLD + (1 - _COLD) * (self._clock() - self._warm_from) / self._timeouts.warm_s)

    def _open(self, seconds: float) -> None:
        self._open_s, self._retry_at = seconds, self._clock() + seconds
        self._probe_until = None
        self._soft_at.clear()

    def _is_probing(self) -> bool:
        return self._probe_until is not None and self._clock() < self._probe_until

    def _too_many_failures(self) -> bool:
        """The deque holds exactly the number that opens the circuit: the oldest of a full one decides."""
        now = self._clock()
        self._soft_at.append(now)
        return len(self._soft_at) == self._soft_at.maxlen and now - self._soft_at[0] <= self._timeouts.soft_window_s
