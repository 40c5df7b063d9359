"""Runs one command in a session of its own, and leaves no process of it behind: `python guard.py GRACE_S COMMAND...`

A stand-alone script with the standard library alone. vLLM is a tree of processes, and the node that starts it may be
killed: then this script ends the tree. The node holds the other end of this script's standard input: when that
closes, or on SIGTERM, the command gets SIGTERM and GRACE_S seconds, then everything in its session is killed. Python's
resource trackers go last: they remove shared memory that killed processes left.

The session is this script's own, so the node ends it where this script was killed. Where both were, the connector
inside vLLM notices: `GUARD_VARIABLE` names the process that it must not outlive.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

_POLL_S = 0.1
_TRACKERS_S = 3.0  # for the resource trackers to remove what is left
_PDEATHSIG, _SUBREAPER = 1, 36  # of Linux's prctl
GUARD_VARIABLE = "DISAGG_VLLM_GUARD"  # as in `vllm_connector/parent_watch.py`


def main() -> int:
    grace_s, command = float(sys.argv[1]), sys.argv[2:]
    _prctl(_SUBREAPER, 1)  # orphans of the command become children of this process
    if os.getsid(0) != os.getpid():
        os.setsid()
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: stopping.append(number))
    # The command dies with this process, whose main thread forks it.
    command_process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        process_group=0,
        preexec_fn=lambda: _prctl(_PDEATHSIG, signal.SIGKILL),
        env=os.environ | {GUARD_VARIABLE: f"{os.getpid()} {_started(os.getpid())}"},
    )
    code = None
    while code is None and not stopping and not _parent_is_gone():
        code = _reap(command_process.pid)
    if code is None:
        with suppress(ProcessLookupError):
            os.kill(command_process.pid, signal.SIGTERM)
        until = time.monotonic() + grace_s
        while code is None and time.monotonic() < until:
            time.sleep(_POLL_S)
            code = _reap(command_process.pid)
    end_session(os.getpid())
    return code if code is not None else -signal.SIGKILL


def _prctl(option: int, value: int) -> None:
    with suppress(OSError, AttributeError):  # only Linux has it
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _parent_is_gone() -> bool:
    readable, _, _ = select.select([sys.stdin], [], [], _POLL_S)
    return bool(readable) and not os.read(sys.stdin.fileno(), 4096)


def _reap(wanted: int) -> int | None:
    """The exit code of `wanted` if it has ended. Other children that ended are reaped too."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return None
            if pid == wanted:
                return os.waitstatus_to_exitcode(status)
    return None


def end_session(session: int) -> None:
    """All processes of it but the caller are gone when this returns."""
    until = time.monotonic() + _TRACKERS_S
    while members := [pid for pid in _members(session) if pid != os.getpid()]:
        others = [pid for pid in members if not _is_tracker(pid)]
        for pid in others or (members if time.monotonic() > until else []):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S / 4)


def _members(session: int) -> list[int]:
    """Without zombies. One whose other threads still end has its ports, its files and its memory on the GPU."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
            state, own_session, threads = fields[0], int(fields[3]), int(fields[17])
            if own_session == session and (state != "Z" or threads > 1):
                found.append(int(name))
    return found


def _started(pid: int) -> str:
    """When a process began, by the kernel's clock: another one may get the same number later."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[19]


def _is_tracker(pid: int) -> bool:
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return b"resource_tracker" in file.read()
    return False


if __name__ == "__main__":
    exit_code = main()
    sys.exit(exit_code if exit_code >= 0 else 128 - exit_code)
