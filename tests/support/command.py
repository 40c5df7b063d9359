"""Run the `disagg` command as a child process, or in this one."""

import io
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

from disaggregated_inference.cli.main import main
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


def run_here(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The same in this process: for a command that ends by itself."""
    told, errors, code = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(told), redirect_stderr(errors), patch("sys.argv", ["disagg", *arguments]), _unchanged():
        try:
            main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
    return subprocess.CompletedProcess(arguments, code, told.getvalue(), errors.getvalue())


@contextmanager
def _unchanged() -> Iterator[None]:
    """What a command changes for its whole process: a signal, and where logs go."""
    handler = signal.getsignal(signal.SIGTERM)
    loggers = [logging.getLogger(name) for name in ("disaggregated_inference", "uvicorn")]
    before = [(logger, list(logger.handlers), logger.level, logger.propagate) for logger in loggers]
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
        for logger, handlers, level, propagate in before:
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)


def read_output(file: IO[str]) -> str:
    """Read what a child process has written so far. Without seek(): parent and child share the file position."""
    return os.pread(file.fileno(), 1 << 26, 0).decode()
