"""Start node processes by fork, from a process that has imported the engines already.

A node takes about five seconds to import torch, transformers and mlx-lm; the tests start over a hundred of them. A
forked node runs the same `main()` as the `disagg` command. Elsewhere than on Linux, and with a GPU, nodes are started
as usual: there, a fork after the imports is not safe.
"""

import atexit
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO

from tests.support.engines import DEVICE, ENGINE_OPTIONS
from tests.support.waiting import until

_PR_SET_CHILD_SUBREAPER = 36
_FORKER = Path(__file__).with_name("forker.py")


class ForkedProcess:
    """The part of `subprocess.Popen` that the tests use."""

    def __init__(self, pid: int, stdout: IO[bytes]) -> None:
        self.pid, self.stdout = pid, stdout
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        if not until(lambda: self.poll() is not None, timeout):
            raise subprocess.TimeoutExpired("disagg", timeout)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


AnyProcess = ForkedProcess | subprocess.Popen[bytes]


def start_command(*arguments: str, stderr: IO[str], **environment: str) -> AnyProcess:
    """`disagg ARGUMENTS` as a new process, with its stdout in a pipe."""
    command = [sys.executable, "-m", "disaggregated_inference", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, env=os.environ | environment)


def start_node(*arguments: str, stderr: IO[str], **environment: str) -> AnyProcess:
    """The same by fork, where that is safe. Only `serve` ends with the interpreter's own clean-up."""
    if not can_fork():
        return start_command(*arguments, stderr=stderr, **environment)
    return start_forked(arguments, os.environ | environment, os.getcwd(), stderr)


def can_fork() -> bool:
    return sys.platform == "linux" and DEVICE == "cpu"


def start_forked(
    arguments: Sequence[str], environment: Mapping[str, str], folder: str, stderr: IO[str], stdin: int | None = None
) -> ForkedProcess:
    """With this environment alone. `stdin`: a file descriptor; None: nothing to read."""
    near, far = os.pipe()
    message = json.dumps([arguments, dict(environment), folder]).encode()
    try:
        socket.send_fds(_forker(), [message], [far, stderr.fileno(), *([] if stdin is None else [stdin])])
    finally:
        os.close(far)
    return ForkedProcess(int(_forker().recv(100)), os.fdopen(near, "rb"))


@cache
def _forker() -> socket.socket:
    """One for all tests of this process. It ends when this end of the socket is closed."""
    # The forker's nodes are its grandchildren; this makes them our children, whose exit codes we get.
    assert ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with far:
        command = [sys.executable, str(_FORKER), str(far.fileno()), *ENGINE_OPTIONS]
        process = subprocess.Popen(command, pass_fds=[far.fileno()], stdin=subprocess.DEVNULL)
    atexit.register(process.wait, 10)
    atexit.register(near.close)  # handlers run last in, first out
    return near
