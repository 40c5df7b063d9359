"""Readings of the processes in the sandbox, for the driver: their memory, their processor time, and the time that they
had.

A cell's time is wall time without the time in which its processes waited for a processor: on a busy machine a student
gets the same time as on a quiet one."""

import contextlib
import os
import time
from pathlib import Path

MAX_STRETCH = 8  # a second of a cell's time is at most so many seconds on the wall
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_NS = 1e-9
_TICKS = os.sysconf("SC_CLK_TCK")

Times = dict[str, tuple[float, float]]  # by thread: seconds on a processor, seconds of waiting for one


class CellClock:
    """`own_s`: the time that a cell had since the clock was made. `tick` moves it on."""

    def __init__(self) -> None:
        self.own_s = 0.0
        self._at_s, self._times = time.monotonic(), read_times()

    def tick(self) -> None:
        now_s, times = time.monotonic(), read_times()
        self.own_s += own_time_s(now_s - self._at_s, self._times, times)
        self._at_s, self._times = now_s, times


def own_time_s(wall_s: float, before: Times, after: Times) -> float:
    """Of `wall_s` seconds. A notebook whose processes keep a whole processor busy does not wait for others."""
    old = {name: before.get(name, (0.0, 0.0)) for name in after}
    busy_s = sum(run - old[name][0] for name, (run, _) in after.items())
    waited_s = max((wait - old[name][1] for name, (_, wait) in after.items()), default=0.0)
    return min(wall_s, max(wall_s - waited_s, busy_s, wall_s / MAX_STRETCH))


def read_times() -> Times:
    """Of every thread in this sandbox. The driver's work is no part of a cell; its waiting is: it takes the outputs."""
    found: Times = {}
    for process in [str(os.getpid()), *_others()]:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{process}/task"):
                with contextlib.suppress(OSError, ValueError):
                    run, wait = Path(f"/proc/{process}/task/{thread}/schedstat").read_text().split()[:2]
                    found[thread] = 0 if int(process) == os.getpid() else int(run) * _NS, int(wait) * _NS
    return found


def _others() -> list[str]:
    return [entry for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getpid()]


def resident_bytes() -> int:
    """Of all processes in this sandbox, without this one. Pages that processes share count for each: quick to read."""
    total = 0
    for entry in _others():
        with contextlib.suppress(OSError, IndexError, ValueError):
            total += int(Path(f"/proc/{entry}/statm").read_text().split()[1]) * _PAGE_BYTES
    return total


def proportional_bytes() -> int:
    """The same, with shared pages counted once."""
    total = 0
    for entry in _others():
        with contextlib.suppress(OSError, IndexError, ValueError):
            rollup = Path(f"/proc/{entry}/smaps_rollup").read_text()
            total += int(rollup.split("Pss:")[1].split()[0]) * 1024
    return total


class CpuMeter:
    """Processor time of all processes in this sandbox together, also of those that have ended: a process counts its
    children when it waits for them; of others the last reading counts."""

    def __init__(self) -> None:
        self._before_s, self._most_s, self._gone_s = 0.0, 0.0, 0.0
        self._own: dict[tuple[str, str], float] = {}  # by process id and start

    def read_s(self) -> float:
        readings = {name: found for name, found in map(_cpu_of, _others()) if found}
        self._most_s = max(self._most_s, sum(own + waited for own, waited in readings.values()))
        self._gone_s += sum(own for name, own in self._own.items() if name not in readings)
        self._own = {name: own for name, (own, _) in readings.items()}
        return self._before_s + max(self._most_s, self._gone_s + sum(self._own.values()))

    def start_again(self) -> None:
        """All processes are about to be killed."""
        self._before_s, self._most_s, self._gone_s, self._own = self.read_s(), 0.0, 0.0, {}


def _cpu_of(process: str) -> tuple[tuple[str, str], tuple[float, float] | None]:
    """Its own seconds, and those of children that it waited for."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        own, waited = (sum(map(int, fields[start : start + 2])) / _TICKS for start in (11, 13))
        return (process, fields[19]), (own, waited)
    except (OSError, IndexError, ValueError):  # it has just ended
        return (process, ""), None
