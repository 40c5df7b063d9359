"""No process of vLLM outlives the guard that its node started it under (`vllm_node/guard.py`), even where node and
guard were killed and no process is left to end it. A vLLM that the user started has no guard."""

import os
import signal
import threading
import time

GUARD_VARIABLE = "DISAGG_VLLM_GUARD"  # the guard's number, and when it began: another process may get that number later
_LOOK_S = 1.0
_watching = 0  # the process that has such a thread: forked ones have none


def watch() -> None:
    """In this process, from now on."""
    global _watching
    guard, _, started = os.environ.get(GUARD_VARIABLE, "").partition(" ")
    if started and _watching != os.getpid():
        _watching = os.getpid()
        threading.Thread(target=_end_with, args=(int(guard), started), name="disagg-lifeline", daemon=True).start()


def _end_with(guard: int, started: str) -> None:
    while _runs(guard, started):
        time.sleep(_LOOK_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _runs(pid: int, started: str) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:  # this process may have no descriptor left
        return True
    return fields[0] not in "ZX" and fields[19] == started
