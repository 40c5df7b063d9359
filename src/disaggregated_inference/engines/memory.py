"""The memory that this machine has left. Default KV budgets are a share of it."""

import math
import os
import platform
import re
import subprocess
from pathlib import Path

from disaggregated_inference.timeouts import SystemTimeouts

_RECLAIMABLE = ("free", "inactive", "speculative", "purgeable")  # pages that macOS gives to new allocations
_FALLBACK_SHARE = 4  # one part in four of all memory, if the free memory is unknown


def available_bytes(timeouts: SystemTimeouts = SystemTimeouts()) -> int:
    """Memory for new allocations without swapping; a quarter of all memory if the system does not tell."""
    try:
        if platform.system() == "Linux":
            return int(min(parse_meminfo(Path("/proc/meminfo").read_text()), _container_bytes()))
        if platform.system() == "Darwin":
            command, limit_s = ["/usr/bin/vm_stat"], timeouts.program_s
            result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=limit_s)
            return parse_vm_stat(result.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _FALLBACK_SHARE


def _container_bytes() -> float:
    """What the container's limit leaves; infinite without a limit."""
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
    """The free and reclaimable pages in macOS's `vm_stat`."""
    size = re.search(r"page size of (\d+) bytes", text)
    pages = [
        int(count) for kind in _RECLAIMABLE for count in re.findall(rf"^Pages {kind}:\s+(\d+)", text, re.MULTILINE)
    ]
    if not size or not pages:
        raise ValueError("unknown vm_stat output")
    return int(size[1]) * sum(pages)
