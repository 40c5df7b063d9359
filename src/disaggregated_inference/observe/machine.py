"""Readings that every machine has: processor, memory, network. By psutil, on Linux and macOS."""

import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from disaggregated_inference.api import NetworkReading
from disaggregated_inference.timeouts import SystemTimeouts

_MAX_NETWORKS = 16
_MODEL_FILES = ("/sys/class/dmi/id/product_name", "/proc/device-tree/model")


def machine_name() -> str:
    """The model of the machine, such as Mac Studio's Mac15,14; empty if it is not known."""
    if sys.platform == "darwin":
        return sysctl("hw.model")
    for file in _MODEL_FILES:
        try:
            return Path(file).read_text(encoding="utf-8", errors="replace").strip("\0\n ")[:200]
        except OSError:
            continue
    return ""


def chip_name() -> str:
    return sysctl("machdep.cpu.brand_string") if sys.platform == "darwin" else platform.machine()


def sysctl(name: str, timeouts: SystemTimeouts = SystemTimeouts()) -> str:
    try:
        command, limit_s = ["/usr/sbin/sysctl", "-n", name], timeouts.program_s
        found = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip()[:200]


class HostReader:
    """Rates are those since the last reading; the first has none."""

    def __init__(self) -> None:
        self.name, self.cpu_count = machine_name(), psutil.cpu_count() or 0
        psutil.cpu_percent()  # begins the first interval
        self._networks, self._read_at = psutil.net_io_counters(pernic=True), time.monotonic()

    def cpu_share(self) -> float:
        return min(1.0, max(0.0, psutil.cpu_percent() / 100))

    def memory(self) -> tuple[int, int]:
        """Bytes in use and bytes in all. In use is what no program could get without swapping."""
        found = psutil.virtual_memory()
        return found.total - found.available, found.total

    def networks(self) -> tuple[NetworkReading, ...]:
        """The interfaces that are up, those with the most traffic first."""
        now, counters, states = time.monotonic(), psutil.net_io_counters(pernic=True), psutil.net_if_stats()
        seconds, before = now - self._read_at, self._networks
        self._networks, self._read_at = counters, now
        up = [name for name in counters if name in states and states[name].isup]
        up.sort(key=lambda name: (-counters[name].bytes_recv - counters[name].bytes_sent, name))
        return tuple(
            NetworkReading(
                name=name[:100],
                received_bytes_s=_rate(before, counters, name, "bytes_recv", seconds),
                sent_bytes_s=_rate(before, counters, name, "bytes_sent", seconds),
                line_rate_bits_s=states[name].speed * 1e6 or None,  # 0: the interface has none
            )
            for name in up[:_MAX_NETWORKS]
        )


def _rate(
    before: Mapping[str, object], now: Mapping[str, object], name: str, field: str, seconds: float
) -> float | None:
    """None: the interface is new, or its counter began again."""
    if name not in before or seconds <= 0:
        return None
    count: int = getattr(now[name], field) - getattr(before[name], field)
    return count / seconds if count >= 0 else None
