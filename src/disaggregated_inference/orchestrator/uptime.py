"""The share of time in which every model could be served, as this process saw it."""

import time
from collections.abc import Callable


class Uptime:
    """`observe` is called with every poll; what it says holds until the next call."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._up_s = self._all_s = 0.0
        self._since: float | None = None
        self._serves = False

    def observe(self, serves: bool) -> None:
        now = self._clock()
        if self._since is not None:
            self._all_s += now - self._since
            self._up_s += now - self._since if self._serves else 0.0
        self._since, self._serves = now, serves

    @property
    def share(self) -> float | None:
        """0 to 1; None until two polls were observed."""
        return self._up_s / self._all_s if self._all_s else None
