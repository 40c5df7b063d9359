"""Run the `disagg` command as a child process."""

import os
import subprocess
import sys
from pathlib import Path
from typing import IO


def disagg(*arguments: str, home: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | ({"DISAGG_HOME": str(home)} if home else {})
    command = [sys.executable, "-m", "disaggregated_inference", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def read_output(file: IO[str]) -> str:
    """Read what a child process has written so far. Without seek(): parent and child share the file position."""
    return os.pread(file.fileno(), 1 << 26, 0).decode()
