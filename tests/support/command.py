"""Run the `disagg` command as a child process."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

from tests.support.forked import start_node


def disagg(*arguments: str, home: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | ({"DISAGG_HOME": str(home)} if home else {})
    command = [sys.executable, "-m", "disaggregated_inference", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def run_forked(*arguments: str, home: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The same, from a process that has imported the engines: a command that needs them saves five seconds, any other
    half a second."""
    with tempfile.TemporaryFile("w+") as errors:
        process = start_node(*arguments, stderr=errors, **({"DISAGG_HOME": str(home)} if home else {}))
        assert process.stdout
        with process.stdout as output:
            text = output.read().decode()
        return subprocess.CompletedProcess(arguments, process.wait(300), text, read_output(errors))


def read_output(file: IO[str]) -> str:
    """Read what a child process has written so far. Without seek(): parent and child share the file position."""
    return os.pread(file.fileno(), 1 << 26, 0).decode()
