"""How much memory this machine has left: what an engine's default KV budget is a share of."""

import math
import os
import platform
import re
import subprocess
from pathlib import Path

_RECLAIMABLE = ("free", "inactive", "speculative", "purgeable")  # what macOS gives up when someone asks
_FALLBACK_SHARE = 4  # of all memory, when nobody says what is free


def available_bytes() -> int:
    """Memory that new allocations can have without pushing anyone else out; a quarter of all where nothing says."""
    try:
        if platform.system() == "Linux":
            return int(min(parse_meminfo(Path("/proc/meminfo").read_text()), _container_bytes()))
        if platform.system() == "Darwin":
            told = subprocess.run(["/usr/bin/vm_stat"], capture_output=True, text=True, check=True, timeout=5)
            return parse_vm_stat(told.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _FALLBACK_SHARE


def _container_bytes() -> float:
    """What a container may still take; no bound where there is none."""
    try:
        most, now = (Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current"))
        return max(int(most) - int(now), 0)
    except (OSError, ValueError):  # no container, or "max"
        return math.inf


def parse_meminfo(text: str) -> int:
    """`MemAvailable` of /proc/meminfo: free pages and the caches that the kernel would drop."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    if not found:
        raise ValueError("no MemAvailable")
    return int(found[1]) * 1024


def parse_vm_stat(text: str) -> int:
    """The pages in macOS's `vm_stat` that nobody holds on to."""
    size = re.search(r"page size of (\d+) bytes", text)
    pages = [
        int(count) for kind in _RECLAIMABLE for count in re.findall(rf"^Pages {kind}:\s+(\d+)", text, re.MULTILINE)
    ]
    if not size or not pages:
        raise ValueError("vm_stat speaks otherwise")
    return int(size[1]) * sum(pages)
