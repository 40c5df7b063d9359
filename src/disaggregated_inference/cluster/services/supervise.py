"""Keeps one command running and rotates its log.

For machines without a service manager (`--detach`), and under launchd, which rotates no logs (`--once`). The supervisor
holds a lock on its state file for as long as it lives. A deploy copies this file into the release: it must import the
standard library alone, so that it can stop a service whose packages are damaged.
"""

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import FrameType
from typing import Any

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_STEADY_S = 60.0  # a command that ran this long had a good start: the next pause is short again
_LOG_BYTES, _LOG_FILES = 10_000_000, 5
_STOP_S = 90.0
_POLL_S = 0.05


class Supervisor:
    """Runs the command until a signal. The signal goes on to the command, which ends its requests first."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        state: Path,
        once: bool,
        log_bytes: int = _LOG_BYTES,
        environment: Path | None = None,
    ) -> None:
        self._command, self._state, self._once, self._log_bytes = command, state, once, log_bytes
        self._environment = environment
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._log = RotatingFileHandler(log, maxBytes=log_bytes, backupCount=_LOG_FILES, encoding="utf-8")
        self._process: subprocess.Popen[str] | None = None
        self._stopping = threading.Event()
        self._restarts = 0

    def run(self) -> int:
        lock = _locked(self._state)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        pause_s = _FIRST_PAUSE_S
        while True:
            started = time.monotonic()
            code = self._run_once(lock)
            if self._stopping.is_set() or self._once:
                return code
            pause_s = _FIRST_PAUSE_S if time.monotonic() - started > _STEADY_S else pause_s
            self._say(f"ended with {code}; it starts again in {pause_s:g} s")
            if self._stopping.wait(pause_s):
                return code
            pause_s = min(_LONGEST_PAUSE_S, pause_s * 2)
            self._restarts += 1

    def _run_once(self, lock: int) -> int:
        try:
            environ = {**os.environ, **read_variables(self._environment)}
            environ["DISAGG_PARENT_PID"] = str(os.getpid())  # the command ends if this process is killed
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=environ,
            )
        except OSError as error:
            self._say(f"cannot start {error.filename or self._command[0]}: {error.strerror}")
            return 127
        _write(lock, {"pid": os.getpid(), "child": self._process.pid, "restarts": self._restarts, "since": time.time()})
        if self._stopping.is_set():  # the signal came before there was a process
            self._process.terminate()
        assert self._process.stdout
        for line in self._process.stdout:
            self._write_output(line.rstrip("\n"))
        return self._process.wait()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:  # the terminal that started it is gone; or a reload, for the gateway
            if self._process and self._process.poll() is None:
                self._process.send_signal(signal.SIGHUP)
            return
        self._stopping.set()
        if self._process and self._process.poll() is None:
            self._process.terminate()

    def _say(self, text: str, level: str = "warning", logger: str = "supervise") -> None:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + f".{int(time.time() % 1 * 1000):03d}Z"
        record = {"time": at, "level": level, "logger": logger, "message": text}
        self._write_line(json.dumps(record))

    def _write_output(self, line: str) -> None:
        """Every line gets a time, so that logs of several machines can be merged."""
        self._write_line(line) if line.startswith('{"time": ') else self._say(line, "info", "output")

    def _write_line(self, line: str) -> None:
        try:
            if self._log.stream and self._log.stream.tell() + len(line) >= self._log_bytes:
                self._log.doRollover()
            if self._log.stream:
                self._log.stream.write(line + "\n")
                self._log.stream.flush()
        except OSError:
            """A full disk costs log lines, not the service."""


def read_variables(path: Path | None) -> dict[str, str]:
    """Lines of NAME='VALUE'."""
    lines = path.read_text(encoding="utf-8").splitlines() if path else []
    pairs = [line.partition("=") for line in lines if "=" in line]
    return {name: value[1:-1] for name, _, value in pairs}


def _locked(state: Path) -> int:
    state.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    number = os.open(state, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        sys.exit(0)  # it runs already
    return number


def _write(number: int, state: dict[str, Any]) -> None:
    os.ftruncate(number, 0)
    os.pwrite(number, json.dumps(state).encode(), 0)


def read_state(path: Path) -> dict[str, Any] | None:
    """Of a supervisor that lives; else None."""
    try:
        number = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return None
    except OSError:
        content = os.pread(number, 4096, 0)
        return dict(json.loads(content)) if content else {}
    finally:
        os.close(number)


def _show(path: Path) -> int:
    state = read_state(path)
    lives = bool(state and _lives(state.get("child", 0)))
    print("running" if lives else "stopped", (state or {}).get("child", 0), (state or {}).get("restarts", 0))
    return 0


def _stop(path: Path) -> int:
    """SIGTERM, and SIGKILL for both after the time for running requests."""
    deadline = time.monotonic() + _STOP_S
    asked: set[int] = set()
    while (state := read_state(path)) is not None:
        pid = state.get("pid", 0)
        if pid and pid not in asked:
            os.kill(pid, signal.SIGTERM)
            asked.add(pid)
        if time.monotonic() > deadline:
            for each in (state.get("child", 0), pid):
                if each:
                    os.kill(each, signal.SIGKILL)
            return 1
        time.sleep(_POLL_S)
    return 0


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return pid > 0


def _detach() -> None:
    """Away from the session of the login, which ends. The parent waits until the child has its lock."""
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)


def main() -> int:
    parser = argparse.ArgumentParser(description="Keep a command running, with a log that rotates.")
    parser.add_argument("--log", type=Path)
    parser.add_argument("--log-bytes", type=int, default=_LOG_BYTES)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--environment", type=Path, help="file of secret variables")
    for option in ("once", "detach", "stop", "show"):
        parser.add_argument(f"--{option}", action="store_true")
    parser.add_argument("command", nargs="*")
    given = parser.parse_args()
    if given.show or given.stop:
        return _show(given.state) if given.show else _stop(given.state)
    if not given.log or not given.command:
        parser.error("--log FILE and a command are needed")
    os.umask(0o077)
    if given.detach:
        _detach()
    return Supervisor(given.command, given.log, given.state, given.once, given.log_bytes, given.environment).run()


if __name__ == "__main__":
    sys.exit(main())
