"""The guard: no process of the command survives it, and none survives the process that started it."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from disaggregated_inference.vllm_connector import parent_watch
from disaggregated_inference.vllm_node import guard
from tests.support.cluster import state_of
from tests.support.waiting import until

GUARD = str(Path(guard.__file__))
# A process that ignores SIGTERM, with a child that does too. It writes the numbers of both.
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if child := os.fork():
    with open(sys.argv[1], "a") as file:
        file.write(f"{os.getpid()}\\n{child}\\n")
time.sleep(600)
"""
pytestmark = pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="it looks into /proc")


@pytest.fixture
def numbers(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "numbers"
    path.touch()
    yield path
    for pid in _pids(path):
        if _runs(pid):
            os.kill(pid, signal.SIGKILL)


def _pids(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().splitlines()]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _start(grace_s: float, *command: str) -> "subprocess.Popen[str]":
    arguments = [sys.executable, "-I", "-S", GUARD, str(grace_s), *command]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, text=True)


def _code(started: "subprocess.Popen[str]") -> int:
    """Its standard input stays open until its end: it is what keeps it running."""
    code = started.wait(60)
    assert started.stdin
    started.stdin.close()
    return code


def _stubborn(numbers: Path, grace_s: float = 0.2) -> "subprocess.Popen[str]":
    started = _start(grace_s, sys.executable, "-c", STUBBORN, str(numbers))
    assert until(lambda: len(_pids(numbers)) == 2, 60)
    return started


@pytest.mark.parametrize("how", ["closed input", "SIGTERM"])
def test_the_whole_session_ends(numbers: Path, how: str) -> None:
    started = _stubborn(numbers)
    assert started.stdin
    started.stdin.close() if how == "closed input" else started.terminate()
    assert _code(started) == 128 + signal.SIGKILL
    assert not [pid for pid in _pids(numbers) if _runs(pid)]


def test_children_of_a_command_that_died_are_ended(numbers: Path) -> None:
    started = _stubborn(numbers, 60)
    os.kill(_pids(numbers)[0], signal.SIGKILL)
    assert _code(started) == 128 + signal.SIGKILL
    assert not [pid for pid in _pids(numbers) if _runs(pid)]


def test_the_exit_code_is_that_of_the_command() -> None:
    started = _start(5, sys.executable, "-c", "import sys; sys.exit(7)")
    assert _code(started) == 7


def test_a_killed_parent_takes_all_with_it(numbers: Path) -> None:
    """The parent is killed: the guard is not told, but its standard input ends."""
    script = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-I', '-S', {GUARD!r}, '0.2', sys.executable, '-c', {STUBBORN!r},"
        f" {str(numbers)!r}], stdin=subprocess.PIPE)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script])
    assert until(lambda: len(_pids(numbers)) == 2, 60)
    parent.kill()
    parent.wait()
    assert until(lambda: not [pid for pid in _pids(numbers) if _runs(pid)], 60)


def _kill_guard(started: "subprocess.Popen[str]") -> None:
    started.kill()
    assert _code(started) == -signal.SIGKILL


def test_the_node_ends_what_a_killed_guard_left(numbers: Path) -> None:
    """The kernel kills the command, and leaves its children."""
    started = _stubborn(numbers)
    command, child = _pids(numbers)
    _kill_guard(started)
    assert until(lambda: not _runs(command), 60)
    assert _runs(child), "the test shows nothing"
    guard.end_session(started.pid)
    assert not _runs(child)


def test_a_process_is_gone_when_its_last_thread_is() -> None:
    """Its main thread has ended, so that it looks like a zombie; another thread has its port."""
    script = (
        "import ctypes, socket, threading, time\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "print(server.getsockname()[1], flush=True)\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    options = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    started: subprocess.Popen[str] = subprocess.Popen([sys.executable, "-c", script], **options)  # type: ignore[call-overload]
    assert started.stdout
    port = int(started.stdout.readline())
    assert until(lambda: state_of(started.pid) == "Z", 60)
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", port)).close()
    guard.end_session(started.pid)
    socket.create_server(("127.0.0.1", port)).close()
    started.stdout.close()
    started.wait()


def test_a_process_with_the_connector_ends_with_the_guard(numbers: Path) -> None:
    """Also where the node is gone. A process that is not watched stays, which shows that nothing else ended it."""
    watched = "from disaggregated_inference.vllm_connector.parent_watch import watch; watch(); watch()"
    report = "; import os, sys, time; open(sys.argv[1], 'a').write(f'{os.getpid()}\\n'); time.sleep(600)"
    code = "import subprocess, sys, time\n"
    code += f"for first in ({watched!r}, 'pass'):\n"
    code += f"    subprocess.Popen([sys.executable, '-c', first + {report!r}, sys.argv[1]])\n"
    code += "    while open(sys.argv[1]).read().count('\\n') < 1 + (first == 'pass'): time.sleep(0.01)\n"
    code += "time.sleep(600)\n"
    started = _start(60, sys.executable, "-c", code, str(numbers))
    assert until(lambda: len(_pids(numbers)) == 2, 60)
    with_connector, without = _pids(numbers)
    _kill_guard(started)
    assert until(lambda: not _runs(with_connector), 60)
    assert _runs(without)


def test_a_vllm_without_a_guard_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(guard.GUARD_VARIABLE, raising=False)
    before = threading.active_count()
    parent_watch.watch()
    assert threading.active_count() == before
    assert guard.GUARD_VARIABLE == parent_watch.GUARD_VARIABLE
