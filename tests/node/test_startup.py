"""A node from its first second on: `loading` while the model loads, errors that name the remedy, a clean end."""

import asyncio
import contextlib
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from disaggregated_inference.api import NodeHealth, StartLine
from disaggregated_inference.errors import BadRequest, DisaggError
from disaggregated_inference.http import announce_as_json, listen_error, require_free_port
from disaggregated_inference.models import ModelFiles
from disaggregated_inference.node.kv_listener import listen
from disaggregated_inference.node.node import Node
from disaggregated_inference.node.startup import Begin, NodeStart
from disaggregated_inference.orchestrator import DisaggregatedInference
from tests.support.cluster import free_port
from tests.support.node_pair import Pair
from tests.support.waiting import until

COMMAND = [sys.executable, "-m", "disaggregated_inference", "serve"]
LONG_S = 60.0


def ask(port: int, path: str, body: Any = None, token: str = "") -> tuple[int, dict[str, Any], str | None]:
    """Status, JSON and Retry-After."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=LONG_S) as response:
            return response.status, json.loads(response.read()), None
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read()), error.headers["Retry-After"]


class Start:
    """A node on a thread of this process, whose load waits for `release`."""

    def __init__(self, load: Callable[[], Node], token: str = "") -> None:
        self.port, self.release = free_port(), threading.Event()
        self.lines: list[StartLine] = []
        self.error: BaseException | None = None
        self._load = load
        health = NodeHealth(status="loading", loaded=False, role="decode", model="tiny", backend="torch")
        self._start = NodeStart(self.load, health, ("127.0.0.1", self.port), token, 1, self.announced)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert until(lambda: bool(self.lines), LONG_S)

    def announced(self, line: StartLine) -> None:
        self.lines.append(line)

    def load(self, begin: Begin) -> Node:
        begin("loading tiny into torch", 0.25)
        self.release.wait()
        return self._load()

    def _run(self) -> None:
        try:
            self._start.run()
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        self.release.set()
        self._start._server.stop()
        self._thread.join()


@pytest.fixture
def loaded(nodes: Callable[..., Pair], tiny_folder: Callable[[str], Path]) -> Node:
    writer = nodes()[1]
    return Node(ModelFiles("tiny", tiny_folder("llama")), writer.kv_memory, None, writer)


@pytest.fixture
def start(loaded: Node) -> Iterator[Start]:
    starting = Start(lambda: loaded)
    yield starting
    assert until(lambda: starting.lines[-1].event == "ready", LONG_S)
    starting.end()


def test_a_loading_node_answers_and_says_what_it_does(start: Start) -> None:
    status, health, _ = ask(start.port, "/health")
    assert (status, health["status"], health["loaded"], health["role"]) == (503, "loading", False, "decode")
    assert health["reason"].startswith("loading tiny into torch 25% (")
    for path, body in (("/status", None), ("/generate", {"tokens": [5]}), ("/decode", {}), ("/model", None)):
        status, answer, retry_after = ask(start.port, path, body)
        assert (status, answer["error"]["code"], retry_after) == (503, "node_loading", "5")
        assert "this node is loading tiny into torch 25% (" in answer["error"]["message"]
        assert answer["error"]["message"].endswith("; try again in 5 s")
    start.release.set()
    assert until(lambda: ask(start.port, "/health")[0] == 200, LONG_S)
    assert ask(start.port, "/generate", {"tokens": [5, 6], "max_new_tokens": 2})[0] == 200
    step, ready = start.lines
    assert step == StartLine(event="step", step="loading tiny into torch", part=0.25)
    assert (ready.event, ready.port, ready.role, ready.model) == ("ready", start.port, "decode", "tiny")


def test_how_much_of_a_step_is_done_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    announce_as_json(StartLine(event="step", step="smollm2: unpacking", part=0.45))
    announce_as_json(StartLine(event="step", step="loading smollm2 into torch", part=None))
    assert capsys.readouterr().out == '{"event": "step", "step": "loading smollm2 into torch"}\n'


def test_the_orchestrator_shows_loading_and_then_uses_the_node(start: Start) -> None:
    config = {"decode_servers": [{"host": "127.0.0.1", "port": start.port, "name": "d", "model": "tiny"}]}

    async def run() -> tuple[dict[str, Any], Any, dict[str, Any]]:
        async with DisaggregatedInference(config) as cluster:
            await cluster.health()
            before = (await cluster.status())["nodes"][0]
            refused = await asyncio.gather(cluster.generate("hello", max_tokens=2, timeout=2), return_exceptions=True)
            start.release.set()
            await asyncio.to_thread(until, lambda: ask(start.port, "/health")[0] == 200, LONG_S)
            await cluster.health()
            return before, refused[0], await cluster.generate("hello", max_tokens=2)

    before, refused, answer = asyncio.run(run())
    assert (before["state"], before["usable"]) == ("loading", False)
    assert "this node is loading tiny into torch" in before["why"]
    assert isinstance(refused, DisaggError)
    assert answer["completion_tokens"] == 2


def test_a_loading_node_wants_its_token(loaded: Node) -> None:
    starting = Start(lambda: loaded, token="secret")
    assert ask(starting.port, "/health")[1]["status"] == "loading"
    assert ask(starting.port, "/status")[1]["error"]["code"] == "unauthorized"
    assert ask(starting.port, "/status", token="secret")[1]["error"]["code"] == "node_loading"
    starting.release.set()
    assert until(lambda: starting.lines[-1].event == "ready", LONG_S)
    assert ask(starting.port, "/status")[0] == 401
    starting.end()


def test_a_failed_load_ends_the_process_with_its_reason() -> None:
    def fail() -> Node:
        raise BadRequest("no such weights")

    starting = Start(fail)
    starting.release.set()
    assert until(lambda: starting.error is not None, LONG_S)
    assert str(starting.error) == "no such weights"
    starting.end()


def test_a_wrong_role_is_named(nodes: Callable[..., Pair], tiny_folder: Callable[[str], Path]) -> None:
    reader, writer = nodes()
    model = ModelFiles("tiny", tiny_folder("llama"))
    for node, path, says in (
        (
            Node(model, reader.kv_memory, reader, None),
            "/decode",
            "this is a prefill node, without /decode: send it to a",
        ),
        (Node(model, reader.kv_memory, reader, None), "/generate", "decode node (`disagg serve --role decode`)"),
        (Node(model, writer.kv_memory, None, writer), "/prefill", "this is a decode node, without /prefill"),
    ):
        starting = Start(lambda node=node: node)  # type: ignore[misc]
        starting.release.set()
        assert until(lambda: starting.lines[-1].event == "ready", LONG_S)  # noqa: B023
        status, answer, _ = ask(starting.port, path, {"tokens": [5]})
        assert (status, answer["error"]["code"], says in answer["error"]["message"]) == (404, "not_found", True), answer
        starting.end()


def test_a_port_in_use_names_the_option() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(BadRequest, match=r"in use; stop the program .* or choose another port with --port$"):
            require_free_port("127.0.0.1", port)
        with pytest.raises(BadRequest, match=rf"^cannot listen on 127.0.0.1:{port}: .* another port with --kv-port$"):
            listen(("127.0.0.1", port))


def test_an_address_of_another_machine_names_the_option() -> None:
    """192.0.2.0/24 is for documentation: no machine has such an address."""
    remedy = r"give --host an address of this machine .*, or 0\.0\.0\.0 for all$"
    with pytest.raises(BadRequest, match=rf"^cannot listen on 192\.0\.2\.1:0: no such address here; {remedy}"):
        require_free_port("192.0.2.1", 0)
    with pytest.raises(BadRequest, match=r"no such address here; give --kv-address an address of this machine"):
        listen(("192.0.2.1", 0))


def test_other_reasons_not_to_listen() -> None:
    assert "choose one above 1023 with --port" in str(listen_error(PermissionError(13, "denied"), "::1", 80))
    unknown = listen_error(socket.gaierror(-2, "Name or service not known"), "nowhere", 80)
    assert "no address is known for this name; give --host an address" in str(unknown)
    assert str(listen_error(OSError(5, "odd"), "::1", 80)).startswith("cannot listen on [::1]:80: odd; check --host")


def serve_error(*arguments: str) -> str:
    run = subprocess.run(
        [*COMMAND, "--engine", "simulated", *arguments], capture_output=True, text=True, timeout=LONG_S
    )
    assert (run.returncode, run.stdout) == (1, "")
    return run.stderr


@pytest.mark.slow
def test_two_nodes_with_the_default_kv_port() -> None:
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # whatever else listens there is as good
            stack.enter_context(socket.create_server(("127.0.0.1", 8100)))
        said = serve_error("--role", "prefill", "--port", "0")
    assert "cannot listen on 127.0.0.1:8100: the port is in use" in said
    assert said.endswith("or choose another port with --kv-port\n")
    port = str(free_port())
    assert f"127.0.0.1:{port}: the port is in use" in serve_error("--port", port, "--kv-port", port)


@pytest.mark.slow
def test_a_signal_while_loading_ends_the_node() -> None:
    """torch takes seconds to import: the signal comes meanwhile."""
    port = free_port()
    node = subprocess.Popen(
        [*COMMAND, "--role", "decode", "--engine", "torch", "--model", "smollm2", "--port", str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    def is_loading() -> bool:
        with contextlib.suppress(OSError):
            return ask(port, "/health")[0] == 503
        return False

    assert until(is_loading, LONG_S)
    node.send_signal(signal.SIGTERM)
    output, errors = node.communicate(timeout=LONG_S)
    events = [json.loads(line)["event"] for line in output.splitlines()]
    assert (events[0], set(events)) == ("start", {"start", "step", "stopping"})
    assert (errors, node.returncode) == ("", 0)


@pytest.mark.slow
def test_a_terminal_gets_sentences() -> None:
    port = free_port()
    near, far = pty.openpty()
    options = ["--engine", "simulated", "--port", str(port), "--kv-port", "0", "--log-level", "error"]
    node = subprocess.Popen([*COMMAND, *options], stdout=far, stderr=far, env=os.environ | {"TERM": "xterm"})
    os.close(far)
    assert until(lambda: _is_healthy(port), LONG_S)
    node.send_signal(signal.SIGINT)
    assert node.wait(LONG_S) == 0
    text = _read_all(near)
    assert "node for prefill and decode: simulated:tiny with simulated: SIMULATED (instant), no inference" in text
    assert f"s: http://127.0.0.1:{port}\r\n  KV transfers: 127.0.0.1:" in text
    assert "Ctrl-C stops it when its running requests are done; a second Ctrl-C stops it at once" in text
    assert text.endswith("stopping\r\n")
    assert "{" not in text


def _is_healthy(port: int) -> bool:
    with contextlib.suppress(OSError):
        return ask(port, "/health")[0] == 200
    return False


def _read_all(terminal: int) -> str:
    text = b""
    with contextlib.suppress(OSError):  # the end of a terminal is an error
        while piece := os.read(terminal, 1 << 16):
            text += piece
    os.close(terminal)
    return text.decode()
