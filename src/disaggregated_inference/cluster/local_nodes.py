"""Nodes and other servers as processes on this machine, for the demo and for benchmarks."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any

from disaggregated_inference.errors import DisaggError

_START_S = 120.0


def shared_cores() -> dict[str, str]:
    """Half of the cores for each of two processes: OpenMP threads that compete for cores are sixty times slower."""
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) // 2))}


def disagg(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "disaggregated_inference", *arguments]


class Process:
    """Without `port`, the server prints its port as JSON when it is ready; else it is ready once the port is open."""

    def __init__(self, name: str, command: list[str], port: int = 0, environ: Mapping[str, str] = os.environ) -> None:
        self.name, self.url, self._port = name, "", port
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in stop; a pipe would fill up
        output = self._log if port else subprocess.PIPE
        self._process = subprocess.Popen(command, stdout=output, stderr=self._log, text=True, env=environ)
        self.pid = self._process.pid

    def ready(self) -> None:
        """Wait until the server accepts connections at `url`."""
        port = self._port or self._printed_port()
        deadline = time.monotonic() + _START_S
        while not _accepts(port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise self._failed()
            time.sleep(0.1)
        self.url = f"http://127.0.0.1:{port}"

    def _printed_port(self) -> int:
        assert self._process.stdout
        if not (line := self._process.stdout.readline()):
            raise self._failed()
        port: int = json.loads(line)["port"]
        return port

    def _failed(self) -> DisaggError:
        self._log.seek(0)
        return DisaggError(f"{self.name} did not start:\n{self._log.read()[-2000:].strip()}")

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._log.close()


def _accepts(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


@contextmanager
def running(processes: Sequence[Process], ready: Callable[[Any], None] = Process.ready) -> Iterator[None]:
    """Processes start when they are created; wait for all of them, and stop them at the end."""
    try:
        for process in processes:
            ready(process)
        yield
    finally:
        for process in processes:
            process.stop()


@dataclass(slots=True)
class ClientView:
    """One completion as its client sees it."""

    started: float = field(default_factory=time.perf_counter)
    first_token_s: float = 0.0
    total_s: float = 0.0
    tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)

    def add_token(self) -> None:
        self.first_token_s = self.first_token_s or time.perf_counter() - self.started
        self.tokens += 1

    def end(self) -> None:
        self.total_s = time.perf_counter() - self.started


class LocalNode(Process):
    """A node process. Call `ready` before the first request."""

    def __init__(self, role: str, engine: str, *arguments: str, name: str = "") -> None:
        self.role, self.engine = role, engine
        command = disagg("serve", "--role", role, "--engine", engine, *arguments, "--port", "0")
        super().__init__(name or f"the {role} node", command, environ=shared_cores() | os.environ)

    def _post(self, path: str, body: dict[str, Any]) -> IO[bytes]:
        try:
            response: IO[bytes] = urllib.request.urlopen(self.url + path, json.dumps(body).encode(), timeout=300)
        except urllib.error.HTTPError as error:
            with error:
                raise DisaggError(json.load(error)["error"]["message"]) from None
        return response

    def prefill(self, tokens: list[int]) -> Any:
        """Start a prefill; returns its context."""
        with self._post("/prefill", {"tokens": tokens, "wait": False}) as response:
            return json.load(response)["context"]

    def stream(self, path: str, body: dict[str, Any], view: ClientView, write: Callable[[str], None]) -> ClientView:
        with self._post(path, body | {"stream": True}) as response:
            for line in response:
                if not line.startswith(b"data: "):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise DisaggError(event["error"]["message"])
                if "token" not in event:
                    view.metrics = event["metrics"]
                    break
                view.add_token()
                view.token_ids.append(event["token"])
                write(event["text"])
        view.end()
        return view


def _ignore(text: str) -> None:
    """Where the text does not matter."""


def generate_disaggregated(
    prefill: LocalNode, decode: LocalNode, tokens: list[int], max_tokens: int, write: Callable[[str], None] = _ignore
) -> ClientView:
    """Both nodes at once: the KV transfer starts while the prefill is running. `write` gets the text of each token."""
    view = ClientView()
    return decode.stream("/decode", {"context": prefill.prefill(tokens), "max_new_tokens": max_tokens}, view, write)


def generate_local(decode: LocalNode, tokens: list[int], max_tokens: int) -> ClientView:
    """On the decode node alone."""
    return decode.stream("/generate", {"tokens": tokens, "max_new_tokens": max_tokens}, ClientView(), _ignore)
