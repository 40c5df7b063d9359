"""A simulated device: it computes nothing, and its work takes time.

Work is queued and runs in order, as on a GPU: a launch returns at once, reading a result waits. Waits have an absolute
end, so the time that Python needs meanwhile is part of them.
"""

import time


class Device:
    def __init__(self) -> None:
        self._free_at = 0.0

    def launch(self, seconds: float) -> float:
        """Queue work of this length; returns when it will start."""
        begin = max(time.perf_counter(), self._free_at)
        self._free_at = begin + seconds
        return begin


def wait_until(moment: float) -> None:
    left_s = moment - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)
