"""CPU time and memory of a process, and free ports."""

import platform
import socket
import subprocess
import time


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads of the process so far."""
    if platform.system() == "Linux":
        return time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid()
    return parse_cpu_time(_ps(pid, "cputime="))


def resident_bytes(pid: int) -> int:
    return int(_ps(pid, "rss=")) * 1024


def _ps(pid: int, column: str) -> str:
    return subprocess.check_output(["ps", "-o", column, "-p", str(pid)], text=True).strip()


def parse_cpu_time(text: str) -> float:
    """Seconds from the output of ps: 1-02:03:04, 02:03:04 or 2:03.45."""
    days, _, rest = text.rpartition("-")
    seconds = 0.0
    for part in rest.split(":"):
        seconds = seconds * 60 + float(part)
    return seconds + 86400 * int(days or 0)
