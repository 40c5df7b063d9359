"""A cluster of node processes on this machine, with fixed ports, so that a node can die and come back."""

import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.conftest import until, written

# Not where the system finds ports for whoever dials: one of those is soon taken by somebody's connection. Each worker
# has some thousands of its own.
_FIRST, _EACH = 10_000, 5_000
_scheduler = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 4
_ports = itertools.cycle(range(_FIRST + _scheduler * _EACH, _FIRST + (_scheduler + 1) * _EACH))
for _ in range(random.SystemRandom().randrange(_EACH)):  # beside another run of the tests
    next(_ports)


def free_port() -> int:
    """Free now, and still so when a process has started that will listen there."""
    for port in _ports:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("there is always another port")


class Process:
    """A node that can be killed, frozen and started again at the same address."""

    def __init__(self, name: str, role: str, engine: str, model: str, *arguments: str) -> None:
        self.name, self.role, self.engine, self.model = name, role, engine, model
        self.port = free_port()
        self._command = [sys.executable, "-m", "disaggregated_inference", "serve", "--role", role, "--engine", engine]
        self._command += ["--model", model, "--port", str(self.port), *arguments]
        self.kv_port = free_port()
        self.kv_addresses: list[str] = []  # that the config gives, where it gives any
        if role != "decode":
            self._command += ["--kv-port", str(self.kv_port)]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in end
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=self.log)

    def ready(self) -> "Process":
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, f"{self.name} did not start: {self.said()}"
        return self

    def said(self) -> str:
        return written(self.log)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        assert until(lambda: state_of(self.process.pid) == "T")

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/status", timeout=30) as response:
            found: dict[str, Any] = json.loads(response.read())
            return found

    def nothing_left(self) -> bool:
        status = self.status()
        busy = status["waiting"], status["queue"]["waiting"], status["slots"]["used"], status.get("tickets", 0)
        return not any(busy) and not status["kv"]["reserved_bytes"] and not status["integrity_faults"]

    def end(self) -> None:
        self.kill()
        self.log.close()

    @property
    def entry(self) -> dict[str, Any]:
        entry = {"host": "127.0.0.1", "port": self.port, "name": self.name, "model": self.model_name}
        return entry | ({"kv_addresses": self.kv_addresses} if self.kv_addresses else {})

    @property
    def model_name(self) -> str:
        return Path(self.model).name


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def config_of(*nodes: Process, **policies: Any) -> dict[str, Any]:
    return {
        "prefill_servers": [node.entry for node in nodes if node.role == "prefill"],
        "decode_servers": [node.entry for node in nodes if node.role != "prefill"],
        "policies": {"local": "never", "poll_s": 0.5} | policies,
    }
