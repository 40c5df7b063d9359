"""`disagg serve --engine vllm` with the real vLLM on the CPU, as a child process, and the processes below it."""

import json
import os
import signal
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Process
from tests.support.waiting import until

MEMORY = "--kv-cache-memory-bytes 134217728 --max-model-len 2048"
CHUNK = 64


def serve_vllm(folder: Path, arguments: str = MEMORY, name: str = "spark-1") -> Process:
    """Not ready yet."""
    options = ["--dtype", "float32", "--chunk", str(CHUNK), "--kv-memory", "64M", "--threads", "1", "--drain", "5"]
    return Process(name, "prefill", "vllm", str(folder), *options, "--vllm-args", arguments, "--log-level", "info")


def loading_health(node: Process) -> Any:
    """What /health says before the node serves."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"http://127.0.0.1:{node.port}/health", timeout=30)
    with refused.value as response:
        return json.loads(response.read())


def descendants(pid: int) -> list[int]:
    """Processes below this one, without zombies."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            parents[int(path.parent.name)] = int(parent)
    found, new = [], [pid]
    while new:
        new = [child for child, parent in parents.items() if parent in new]
        found += new
    return found


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def listening_ports(pids: list[int]) -> list[int]:
    """TCP ports at which these processes listen, by the inodes of their sockets."""
    links = {os.readlink(link) for pid in pids for link in _descriptors(pid) if link.is_symlink()}
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in links:
                found.append(int(words[1].rpartition(":")[2], 16))
    return found


def _descriptors(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return []


def errno_of_stranger(path: Path) -> int:
    """What another user gets who connects to this Unix socket; 0: a connection."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.setuid(65534)
    with socket.socket(socket.AF_UNIX) as connection:
        os._exit(connection.connect_ex(str(path)))


def engine_cores(pid: int) -> list[int]:
    """vLLM names its processes: `VLLM::EngineCore`."""
    return [child for child in descendants(pid) if "EngineCore" in command_of(child)]


def guards(pid: int) -> list[int]:
    return [child for child in descendants(pid) if "guard.py" in command_of(child)]


def kill_and_watch(node: Process, seconds: float = 120.0) -> list[str]:
    """Kill a node and its guard, which no code of them can handle. Returns what of its vLLM is left: processes and
    shared memory."""
    below = descendants(node.process.pid)
    assert len(below) >= 3, "the guard, the API server and the engine"
    shared = {word for pid in below for word in _maps_of(pid).split() if word.startswith("/dev/shm/")}
    guard = guards(node.process.pid)
    node.process.kill()
    os.kill(guard[0], signal.SIGKILL)
    until(lambda: not any(map(runs, below)), seconds)
    return [command_of(pid) for pid in below if runs(pid)] + [name for name in shared if Path(name).exists()]


def _maps_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""
