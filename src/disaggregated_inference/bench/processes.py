"""A server in a process of its own, and what it took of the machine."""

import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time

from disaggregated_inference.errors import DisaggError

_START_S = 120.0


class Process:
    """Given no port, it prints one in a line of JSON when it is ready; given one, it is ready once that is open."""

    def __init__(self, name: str, command: list[str], port: int = 0, **environment: str) -> None:
        self.name, self._port = name, port
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in stop; a pipe nobody reads would fill up
        self._process = subprocess.Popen(
            command,
            stdout=self._log if port else subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | environment,
        )

    def ready(self) -> str:
        """Wait for it; returns its URL."""
        port = self._port or self._told_port()
        deadline = time.monotonic() + _START_S
        while not _accepts(port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise self._failed()
            time.sleep(0.1)
        return f"http://127.0.0.1:{port}"

    def _told_port(self) -> int:
        assert self._process.stdout
        if not (line := self._process.stdout.readline()):
            raise self._failed()
        port: int = json.loads(line)["port"]
        return port

    def _failed(self) -> DisaggError:
        self._log.seek(0)
        return DisaggError(f"{self.name} did not start:\n{self._log.read()[-2000:].strip()}")

    def cpu_s(self) -> float:
        """Of all its threads, so far."""
        if platform.system() == "Linux":
            return time.clock_gettime(~self._process.pid << 3 | 2)  # what clock_getcpuclockid makes of a process
        return seconds_of(self._ps("cputime="))

    def resident_bytes(self) -> int:
        return int(self._ps("rss=")) * 1024

    def _ps(self, column: str) -> str:
        return subprocess.check_output(["ps", "-o", column, "-p", str(self._process.pid)], text=True).strip()

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._log.close()


def ours(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "disaggregated_inference", *arguments]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def _accepts(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


def seconds_of(text: str) -> float:
    """As ps says it: 1-02:03:04, 02:03:04 or 2:03.45."""
    days, _, rest = text.rpartition("-")
    seconds = 0.0
    for part in rest.split(":"):
        seconds = seconds * 60 + float(part)
    return seconds + 86400 * int(days or 0)
