"""Our own supervisor: restarts, stops, rotates, and never runs twice."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from disaggregated_inference.cluster.services import ServiceState, supervise
from tests.support.waiting import until

SUPERVISE = [sys.executable, "-I", supervise.__file__]


class Supervised:
    """A shell script under a supervisor in the background."""

    def __init__(self, folder: Path) -> None:
        self.log, self.state_file = folder / "logs" / "x.log", folder / "run" / "x.json"

    def start(self, script: str) -> None:
        command = ["--detach", "--log", str(self.log), "--state", str(self.state_file), "--", "sh", "-c", script]
        subprocess.run([*SUPERVISE, *command], check=True)

    @property
    def state(self) -> ServiceState:
        shown = subprocess.run([*SUPERVISE, "--show", "--state", str(self.state_file)], capture_output=True, text=True)
        return ServiceState.parse(shown.stdout)

    def stop(self) -> int:
        return subprocess.run([*SUPERVISE, "--stop", "--state", str(self.state_file)]).returncode

    @property
    def pid(self) -> int:
        return int(json.loads(self.state_file.read_text())["pid"])

    def said(self, text: str) -> bool:
        return self.log.exists() and text in self.log.read_text()


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Supervised]:
    found = Supervised(tmp_path)
    yield found
    found.stop()


def test_a_killed_command_starts_again(supervised: Supervised) -> None:
    supervised.start("echo started; exec sleep 600")
    assert until(lambda: supervised.state.is_running)
    first = supervised.state
    os.kill(first.pid, signal.SIGKILL)
    assert until(lambda: supervised.state.restarts == 1)
    assert until(lambda: supervised.state.is_running)
    assert supervised.state.pid != first.pid
    assert supervised.said("ended with -9; it starts again in 1 s")


def test_stop_ends_both_and_a_stopped_one_is_no_error(supervised: Supervised) -> None:
    supervised.start("trap 'echo drained; exit 0' TERM; while :; do sleep 0.1; done")
    assert until(lambda: supervised.state.is_running)
    child = supervised.state.pid
    assert supervised.stop() == 0
    assert supervised.said("drained")  # SIGTERM reached it, and it had its time
    assert not supervised.state.is_running
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert supervised.stop() == 0


def test_a_second_supervisor_leaves(supervised: Supervised) -> None:
    supervised.start("exec sleep 600")
    assert until(lambda: supervised.state.is_running)
    first = supervised.pid
    supervised.start("echo twice; exec sleep 600")
    time.sleep(0.3)  # it would have written by now
    assert supervised.pid == first
    assert not supervised.said("twice")


def test_a_command_that_cannot_start_is_told(supervised: Supervised) -> None:
    command = ["--once", "--log", str(supervised.log), "--state", str(supervised.state_file), "--", "/no/such/program"]
    assert subprocess.run([*SUPERVISE, *command]).returncode == 127
    assert supervised.said("cannot start /no/such/program: No such file or directory")


def test_once_passes_the_exit_code_on(supervised: Supervised) -> None:
    command = [
        "--once",
        "--log",
        str(supervised.log),
        "--state",
        str(supervised.state_file),
        "--",
        "sh",
        "-c",
        "exit 7",
    ]
    assert subprocess.run([*SUPERVISE, *command]).returncode == 7


def test_lines_get_a_time_and_the_log_rotates(supervised: Supervised) -> None:
    own = '{"time": "t", "message": "own"}'
    script = f"i=0; while [ $i -lt 200 ]; do echo line $i; i=$((i+1)); done; echo '{own}'"
    files = ["--log", str(supervised.log), "--log-bytes", "2000", "--state", str(supervised.state_file)]
    subprocess.run([*SUPERVISE, "--once", *files, "--", "sh", "-c", script], check=True)
    assert supervised.log.read_text().splitlines()[-1] == own
    logs = sorted(supervised.log.parent.iterdir())
    assert len(logs) == 6  # the log and five older ones
    assert all(path.stat().st_size <= 2000 for path in logs)
    assert all(path.stat().st_mode & 0o077 == 0 for path in logs)
    line = json.loads(logs[1].read_text().splitlines()[0])
    assert line["logger"] == "output"
    assert line["time"].endswith("Z")


def test_what_is_missing_on_the_command_line() -> None:
    done = subprocess.run([*SUPERVISE, "--state", "x"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--log FILE and a command are needed" in done.stderr


def test_secret_variables_come_from_a_file(supervised: Supervised, tmp_path: Path) -> None:
    secrets = tmp_path / "environment"
    secrets.write_text("HF_TOKEN='a b$c='\nOTHER='2'\n")
    files = ["--log", str(supervised.log), "--state", str(supervised.state_file), "--environment", str(secrets)]
    subprocess.run([*SUPERVISE, "--once", *files, "--", "sh", "-c", 'echo "<$HF_TOKEN> <$OTHER>"'], check=True)
    assert supervised.said("<a b$c=> <2>")
    secrets.unlink()
    assert subprocess.run([*SUPERVISE, "--once", *files, "--", "true"]).returncode == 127
    assert supervised.said(f"cannot start {secrets}: No such file or directory")
