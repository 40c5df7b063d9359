"""Nodes and other servers as processes on this machine, for `disagg up`, the demo and benchmarks."""

import os
import selectors
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any

import msgspec

from disaggregated_inference.api import (
    Completion,
    DecodeMetrics,
    DecodeRequest,
    ErrorBody,
    NodeStatus,
    PrefillRequest,
    PrefillResponse,
    RequestRecord,
    StartLine,
    StreamEvent,
)
from disaggregated_inference.cluster import without_token
from disaggregated_inference.cores import available_cores
from disaggregated_inference.errors import DisaggError
from disaggregated_inference.timeouts import CommandTimeouts


def shared_cores() -> dict[str, str]:
    """Half of the cores for each of two processes: OpenMP threads that compete for cores are sixty times slower."""
    return {"OMP_NUM_THREADS": str(max(1, available_cores() // 2))}


def disagg(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "disaggregated_inference", *arguments]


class Process:
    """Without `port`, the server prints its port as JSON when it is ready; else it is ready once the port is open.

    It has a session of its own: Ctrl-C reaches this process alone, which stops the others in their order. Where this
    process is killed, `disagg` commands see that their parent is gone, and stop."""

    def __init__(
        self,
        name: str,
        command: list[str],
        port: int = 0,
        environ: Mapping[str, str] = os.environ,
        timeouts: CommandTimeouts = CommandTimeouts(),
    ) -> None:
        self.name, self.url, self._port, self._timeouts = name, "", port, timeouts
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in stop; a pipe would fill up
        output = self._log if port else subprocess.PIPE
        environ = {**environ, "DISAGG_PARENT_PID": str(os.getpid())}
        self._process = subprocess.Popen(
            command, stdout=output, stderr=self._log, text=True, env=environ, start_new_session=True
        )
        self.pid = self._process.pid

    def fileno(self) -> int:
        """Readable when the server is ready, or has ended."""
        assert self._process.stdout
        return self._process.stdout.fileno()

    def ready(self) -> None:
        """Wait until the server accepts connections at `url`."""
        port = self._port or self._printed_port()
        deadline = time.monotonic() + self._timeouts.start_s
        while not _accepts(port, self._timeouts.dial_s):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise self._failed()
            time.sleep(self._timeouts.start_poll_s)
        self.url = f"http://127.0.0.1:{port}"

    def _printed_port(self) -> int:
        assert self._process.stdout
        for line in self._process.stdout:  # one for every step of its start
            if port := msgspec.json.decode(line, type=StartLine).port:
                return port
        raise self._failed()

    def _failed(self) -> DisaggError:
        return DisaggError(f"{self.name} did not start:\n{self.last_words()}")

    def require_alive(self) -> None:
        """Raises with the reason and the last lines of the log."""
        if (code := self._process.poll()) is not None:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            words = self.last_words()
            raise DisaggError(f"{self.name} has ended ({how})" + (f"; its last lines:\n{words}" if words else ""))

    def last_words(self, size_bytes: int = 2000) -> str:
        """The end of its log. The server writes at the same file offset: a `seek` here would move it."""
        end = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size_bytes, max(0, end - size_bytes)).decode(errors="replace").strip()

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def stop(self) -> None:
        self.terminate()
        try:
            self._process.communicate(timeout=self._timeouts.stop_s)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.communicate()
        self._log.close()


def node_status(
    url: str, token: str = "", timeout_s: float = CommandTimeouts().status_s, tls: ssl.SSLContext | None = None
) -> NodeStatus:
    """A node's /status."""
    return msgspec.json.decode(ask(url + "/status", token, timeout_s, tls), type=NodeStatus)


def ask(
    url: str, token: str = "", timeout_s: float = CommandTimeouts().status_s, tls: ssl.SSLContext | None = None
) -> bytes:
    """What a GET of a node answers."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=timeout_s, context=tls) as response:
        content: bytes = response.read()
        return content


def _accepts(port: int, timeout_s: float) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=timeout_s):
            return True
    except OSError:
        return False


def as_ready(processes: Sequence[Process]) -> Iterator[Process]:
    """Each process when it is ready, the quickest first. The first that fails raises."""
    with selectors.DefaultSelector() as selector:
        for process in processes:
            selector.register(process, selectors.EVENT_READ, process)
        while selector.get_map():
            for key, _ in selector.select():
                selector.unregister(key.fileobj)
                key.data.ready()
                yield key.data


@contextmanager
def running(processes: Sequence[Process], ready: Callable[[Any], None] = Process.ready) -> Iterator[None]:
    """Processes start when they are created; wait for all of them, and stop them at the end."""
    with stopping(processes):
        for process in processes:
            ready(process)
        yield


@contextmanager
def stopping(processes: Sequence[Process]) -> Iterator[None]:
    """Stop them at the end of the block. Ctrl-C meanwhile kills them: none is left behind."""
    try:
        yield
    finally:
        with _killed_by_signals(processes):
            for process in processes:
                process.terminate()
            for process in processes:
                process.stop()


@contextmanager
def _killed_by_signals(processes: Sequence[Process]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def kill(*_: object) -> None:
        for process in processes:
            process.kill()

    before = {number: signal.signal(number, kill) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_with_parent(pid: int, timeouts: CommandTimeouts = CommandTimeouts()) -> None:
    """Send SIGTERM to this process when `pid` is no longer its parent: the parent was killed."""

    def watch() -> None:
        while os.getppid() == pid:
            time.sleep(timeouts.parent_s)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent", daemon=True).start()


@dataclass(slots=True)
class ClientView:
    """One completion as its client sees it."""

    started: float = field(default_factory=time.perf_counter)
    first_token_s: float = 0.0
    total_s: float = 0.0
    tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    node_metrics: DecodeMetrics = field(default_factory=DecodeMetrics)  # of a decode node that was asked itself
    completion: Completion | None = None  # of a request through an orchestrator

    @property
    def record(self) -> RequestRecord:
        assert self.completion
        return self.completion.record

    def add_token(self) -> None:
        self.first_token_s = self.first_token_s or time.perf_counter() - self.started
        self.tokens += 1

    def end(self) -> None:
        self.total_s = time.perf_counter() - self.started


class LocalNode(Process):
    """A node process. Call `ready` before the first request."""

    def __init__(self, role: str, engine: str, *arguments: str, name: str = "") -> None:
        self.role, self.engine = role, engine
        command = disagg("serve", "--role", role, "--engine", engine, "--port", "0", "--kv-port", "0", *arguments)
        super().__init__(name or f"the {role} node", command, environ=shared_cores() | without_token())  # on loopback

    def _post(self, path: str, body: PrefillRequest | DecodeRequest) -> IO[bytes]:
        try:
            content, limit_s = msgspec.json.encode(body), self._timeouts.answer_s
            response: IO[bytes] = urllib.request.urlopen(self.url + path, content, timeout=limit_s)
        except urllib.error.HTTPError as error:
            with error:
                raise DisaggError(msgspec.json.decode(error.read(), type=ErrorBody).error.message) from None
        return response

    def prefill(self, tokens: list[int]) -> str:
        """Start a prefill; returns its context."""
        with self._post("/prefill", PrefillRequest(tokens=tokens, wait=False)) as response:
            return msgspec.json.decode(response.read(), type=PrefillResponse).context

    def stream(self, path: str, request: DecodeRequest, view: ClientView, write: Callable[[str], None]) -> ClientView:
        """`request` asks for a stream."""
        with self._post(path, request) as response:
            for line in response:
                if not line.startswith(b"data: "):
                    continue
                event = msgspec.json.decode(line[6:], type=StreamEvent)
                if event.error:
                    raise DisaggError(event.error.message)
                if event.token is None:
                    view.node_metrics = event.node_metrics or view.node_metrics
                    break
                view.add_token()
                view.token_ids.append(event.token)
                write(event.text)
        view.end()
        return view


def _ignore(text: str) -> None:
    """Where the text does not matter."""


def generate_disaggregated(
    prefill: LocalNode, decode: LocalNode, tokens: list[int], max_tokens: int, write: Callable[[str], None] = _ignore
) -> ClientView:
    """Both nodes at once: the KV transfer starts while the prefill is running. `write` gets the text of each token."""
    view = ClientView()
    request = DecodeRequest(context=prefill.prefill(tokens), max_tokens=max_tokens, stream=True)
    return decode.stream("/decode", request, view, write)


def generate_local(decode: LocalNode, tokens: list[int], max_tokens: int) -> ClientView:
    """On the decode node alone."""
    request = DecodeRequest(tokens=tokens, max_tokens=max_tokens, stream=True)
    return decode.stream("/generate", request, ClientView(), _ignore)
