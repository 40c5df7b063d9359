"""Run the `disagg` command as a child process."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

from tests.support.forked import can_fork, start_forked


def disagg(*arguments: str, home: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | ({"DISAGG_HOME": str(home)} if home else {})
    command = [sys.executable, "-m", "disaggregated_inference", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def run_forked(
    *arguments: str,
    home: Path | None = None,
    typed: str | None = None,
    folder: Path | None = None,
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """The same, from a process that has imported the engines: a command that needs them saves five seconds, any other
    half a second. `typed`: its standard input. `environment`: the whole of it."""
    variables = dict(os.environ) if environment is None else dict(environment)
    if home:
        variables["DISAGG_HOME"] = str(home)
    place = str(folder or Path.cwd())
    if not can_fork():
        command = [sys.executable, "-m", "disaggregated_inference", *arguments]
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL} if typed is None else {"input": typed}
        return subprocess.run(command, capture_output=True, text=True, cwd=place, env=variables, timeout=300, **options)
    with tempfile.TemporaryFile("w+") as errors:
        if typed is None:
            process = start_forked(arguments, variables, place, errors)
        else:
            near, far = os.pipe()
            os.write(far, typed.encode())  # less than a pipe holds
            os.close(far)
            process = start_forked(arguments, variables, place, errors, near)
            os.close(near)
        with process.stdout as output:
            text = output.read().decode()
        return subprocess.CompletedProcess(arguments, process.wait(300), text, read_output(errors))


def read_output(file: IO[str]) -> str:
    """Read what a child process has written so far. Without seek(): parent and child share the file position."""
    return os.pread(file.fileno(), 1 << 26, 0).decode()
