"""`disagg` commands in a folder with a cluster file, also at a terminal of their own."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

from tests.support.cluster import state_of
from tests.support.command import run_forked
from tests.support.waiting import until

COMMAND = [sys.executable, "-m", "disaggregated_inference"]
SLOW = ("--profile", "custom:prefill=20000,decode=60", "--kv-memory", "256M")
LONG = "2000"  # tokens: half a minute, unless stopped
TIMEOUT_S = 120.0  # the machine may be busy


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "cluster.json").write_text(json.dumps(config))


def environment_of(folder: Path, variables: dict[str, str]) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("DISAGG_CONFIG", "COLUMNS")}
    return environment | {"TERM": "xterm", "XDG_STATE_HOME": str(folder / "state")} | variables


def start(
    folder: Path, *arguments: str, variables: dict[str, str] | None = None, **options: Any
) -> "subprocess.Popen[str]":
    environment = environment_of(folder, variables or {})
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [*COMMAND, *arguments]
    return subprocess.Popen(command, cwd=folder, env=environment, **(pipes | {"text": True} | options))


def disagg(
    folder: Path, *arguments: str, typed: str | None = None, **variables: str
) -> "subprocess.CompletedProcess[str]":
    return run_forked(*arguments, typed=typed, folder=folder, environment=environment_of(folder, variables))


def json_lines(run: "subprocess.CompletedProcess[str]") -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.stdout.splitlines()]


class Terminal:
    """A process at a terminal of its own."""

    def __init__(self, folder: Path, *arguments: str, columns: int = 80) -> None:
        self.output = ""
        ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, columns))
        self.process = start(folder, *arguments, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        self._end = ours

    def until(self, pattern: str) -> str:
        """The new output up to the pattern."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (found := re.search(pattern, self.output, re.DOTALL)):
            assert time.monotonic() < deadline, self.output
            if select.select([self._end], [], [], 0.1)[0]:
                self.output += os.read(self._end, 4096).decode()
        matched, self.output = self.output[: found.end()], self.output[found.end() :]
        return matched

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def interrupt(self) -> None:
        """It is not a controlling terminal, so the test sends the signal. It waits until the process sleeps: readline
        notices a signal between a key and its next select only with the next key."""
        assert until(lambda: state_of(self.process.pid) == "S")
        self.process.send_signal(signal.SIGINT)

    def end(self) -> int:
        code = self.process.wait(TIMEOUT_S)
        os.close(self._end)
        return code
