"""A cluster of node processes on this machine, with fixed ports, so that a node can die and come back."""

import itertools
import json
import os
import random
import signal
import socket
import tempfile
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from tests.support.command import read_output
from tests.support.forked import start_node
from tests.support.waiting import until

# Outside the range that the system takes for outgoing connections. Each pytest worker has its own ports.
_FIRST, _EACH = 10_000, 5_000
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 4
_ports = itertools.cycle(range(_FIRST + _worker * _EACH, _FIRST + (_worker + 1) * _EACH))
for _ in range(random.SystemRandom().randrange(_EACH)):  # another run of the tests may use the same range
    next(_ports)


def free_port() -> int:
    """A port that is free, and stays free until a new process listens there."""
    for port in _ports:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("there is always another port")


def ready_line(output: IO[Any]) -> dict[str, Any]:
    """Of a server, after the lines about its start; empty if it ended before."""
    for line in output:
        if (told := json.loads(line)).get("event") == "ready":
            found: dict[str, Any] = told
            return found
    return {}


class Process:
    """A node that can be killed, frozen and started again at the same address."""

    def __init__(self, name: str, role: str, engine: str, model: str, *arguments: str) -> None:
        self.name, self.role, self.engine, self.model = name, role, engine, model
        self.port = free_port()
        self.command = ["serve", "--role", role, "--engine", engine, "--model", model]
        self.command += ["--port", str(self.port), *arguments]
        self.kv_port = free_port()
        self.kv_addresses: list[str] = []  # for the config; empty: as the node announces them
        if role != "decode":
            self.command += ["--kv-port", str(self.kv_port)]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in end
        self.start()

    def start(self) -> None:
        self.process = start_node(*self.command, stderr=self.log)

    def ready(self) -> "Process":
        assert self.process.stdout
        assert ready_line(self.process.stdout), f"{self.name} did not start: {self.said()}"
        return self

    def said(self) -> str:
        return read_output(self.log)

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
