"""Readings of an Apple GPU: its use from ioreg, the power of the chip from zeus-apple-silicon (extra `energy`).

Neither needs root. macOS tells temperatures and clocks to root alone, so these are not available.
"""

import plistlib
import subprocess
import time
from collections.abc import Callable
from typing import Any

from disaggregated_inference.api import GpuReading
from disaggregated_inference.timeouts import SystemTimeouts

_INSTALL = "the package zeus-apple-silicon is not installed: pip install 'disaggregated-inference[energy]'"
_IOREG = ("/usr/sbin/ioreg", "-a", "-r", "-d", "1", "-c", "IOAccelerator")
_ROOT_ONLY = "macOS tells it to root only"
_WINDOW = "readings"
_PARTS = ("cpu_total_mj", "gpu_mj", "gpu_sram_mj", "ane_mj", "dram_mj")


def _ask_ioreg(timeouts: SystemTimeouts = SystemTimeouts()) -> bytes:
    return subprocess.run(_IOREG, capture_output=True, timeout=timeouts.program_s, check=True).stdout


class AppleMeter:
    """The energy that macOS counts for the parts of the chip. Raises LookupError with the reason where it cannot."""

    covers = "CPU, GPU, neural engine and memory"

    def __init__(self, monitor: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        try:
            self._monitor = monitor or _monitor()
            self._monitor.begin_window(_WINDOW)
        except RuntimeError as error:
            raise LookupError(f"macOS does not tell the chip's energy: {error}"[:300]) from error
        self._clock, self._began_at = clock, clock()

    def read(self) -> tuple[float | None, float | None]:
        """Watts since the last call: of the whole chip, and of its GPU. None: this chip does not count it."""
        counted, now = self._monitor.end_window(_WINDOW), self._clock()
        seconds, self._began_at = now - self._began_at, now
        self._monitor.begin_window(_WINDOW)
        known = [value for name in _PARTS if (value := getattr(counted, name, None)) is not None]
        if seconds <= 0 or not known:
            return None, None
        gpu_mj = getattr(counted, "gpu_mj", None)
        return sum(known) / 1000 / seconds, None if gpu_mj is None else gpu_mj / 1000 / seconds


def _monitor() -> Any:
    try:
        from zeus_apple_silicon import AppleEnergyMonitor
    except ImportError as error:
        raise LookupError(_INSTALL) from error
    return AppleEnergyMonitor()


def apple_gpu(chip: str, power_w: float | None, why_no_power: str, ask: Callable[[], bytes] = _ask_ioreg) -> GpuReading:
    """`chip`: its name, such as Apple M3 Ultra."""
    missing = dict.fromkeys(("temperature_c", "clock_mhz", "memory_clock_mhz", "power_limit_w"), _ROOT_ONLY)
    if power_w is None:
        missing["power_w"] = why_no_power
    used = memory = None
    try:
        used, memory = _usage(ask())
    except (OSError, subprocess.SubprocessError, plistlib.InvalidFileException, LookupError, ValueError) as error:
        missing["utilisation"] = missing["memory_used_bytes"] = f"ioreg: {error}"[:300]
    return GpuReading(
        name=f"{chip} GPU",
        utilisation=used,
        memory_used_bytes=memory,
        memory_shared=True,
        power_w=power_w,
        missing=missing,
    )


def _usage(listing: bytes) -> tuple[float, int | None]:
    """Share of the time, and bytes, from ioreg's property list. Raises LookupError where they are not in it."""
    for entry in plistlib.loads(listing):
        statistics = entry.get("PerformanceStatistics", {})
        if "Device Utilization %" in statistics:
            return min(1.0, statistics["Device Utilization %"] / 100), statistics.get("In use system memory")
    raise LookupError("it lists no GPU with statistics")
