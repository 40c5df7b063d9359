"""A device that computes nothing and takes its time.

Work is queued and takes place one after the other, as on a GPU: whoever launches it goes on at once, whoever reads its
result waits. All waits are for a moment, not for a while, so what Python does meanwhile is part of the time.
"""

import time


class Device:
    def __init__(self) -> None:
        self._free_at = 0.0

    def launch(self, seconds: float) -> float:
        """When work of that length, behind all that was launched before, will begin."""
        begin = max(time.perf_counter(), self._free_at)
        self._free_at = begin + seconds
        return begin


def wait_until(moment: float) -> None:
    left_s = moment - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)
