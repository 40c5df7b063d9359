"""Clients without a token that hold connections open cannot shut a server off: a node, a gateway, an Ollama node."""

import http.client
import json
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from disaggregated_inference.identity import Identity
from tests.support.cluster import Process, config_of, free_port, ready_line
from tests.support.floods import Reopened, few_files, held
from tests.support.gateway import GatewayProcess
from tests.support.identities import Cluster, ask
from tests.support.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="it reads the memory of another process"),
]

MODEL = "simulated:tiny"
HALF_HEAD = b"POST /generate HTTP/1.1\r\nHost: x\r\nX-Slow: "
MIB = 1 << 20


@dataclass(frozen=True)
class Flooded:
    port: int
    pid: int
    path: str  # that reads a body

    @property
    def memory_bytes(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * resource.getpagesize()

    @property
    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def answers(self) -> bool:
        return httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=60).status_code == 200


@pytest.fixture(scope="module")
def node() -> Iterator[Process]:
    made = Process("d", "decode", "simulated", MODEL, "--profile", "custom:prefill=5000,decode=60")
    try:
        yield made.ready()
    finally:
        made.end()


@pytest.fixture(params=["node", "gateway"])
def flooded(request: pytest.FixtureRequest, node: Process, tmp_path: Path) -> Iterator[Flooded]:
    if request.param == "node":
        yield Flooded(node.port, node.process.pid, "/generate")
        return
    gateway = GatewayProcess(tmp_path, config_of(node, local="always")).ready()
    try:
        yield Flooded(int(gateway.url.rpartition(":")[2]), gateway.process.pid, "/v1/chat/completions")
    finally:
        gateway.end()


def test_two_thousand_half_sent_heads(flooded: Flooded) -> None:
    before = flooded.descriptors
    with held(flooded.port, 2000, HALF_HEAD):
        assert flooded.answers()
        assert until(lambda: flooded.descriptors < before + 700, 60), "the oldest are closed"
        assert flooded.answers()
    assert until(lambda: flooded.descriptors < before + 50, 60)


def test_sixty_unfinished_bodies(flooded: Flooded) -> None:
    """16 MiB each, less one byte. Those beyond the limit get an error; the memory of the others is bounded in sum."""
    assert flooded.answers()
    before = flooded.memory_bytes
    head = f"POST {flooded.path} HTTP/1.1\r\nHost: x\r\nContent-Length: {16 * MIB}\r\n\r\n".encode()
    with held(flooded.port, 60, head + b" " * (16 * MIB - 1)) as connections:
        assert flooded.memory_bytes - before < 400 * MIB
        assert flooded.answers()
        assert sum(_was_refused(sock) for sock in connections) > 40
    assert until(flooded.answers)


def _was_refused(sock: socket.socket) -> bool:
    sock.settimeout(0.2)
    try:
        return not (answer := sock.recv(64)) or b" 503 " in answer
    except TimeoutError:
        return False
    except OSError:
        return True


def test_a_request_that_is_being_served_keeps_its_connection() -> None:
    """Few file descriptors, more connections than there are: the running answer goes on, and new ones are served
    afterwards."""
    port, command = free_port(), [sys.executable, "-m", "disaggregated_inference", "serve", "--role", "decode"]
    command += ["--engine", "simulated", "--model", MODEL, "--profile", "custom:prefill=5000,decode=30"]
    with tempfile.TemporaryFile("w+") as log:
        limited = ["bash", "-c", 'ulimit -n 400; exec "$@"', "bash", *command, "--port", str(port)]
        process = subprocess.Popen(limited, stdout=subprocess.PIPE, stderr=log)
        try:
            assert process.stdout
            assert ready_line(process.stdout)
            flooded = Flooded(port, process.pid, "/generate")
            answer = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            body = b'{"tokens": [5, 6], "max_new_tokens": 90, "ignore_eos": true, "stream": true}'
            answer.request("POST", "/generate", body)
            response = answer.getresponse()
            with held(port, 600, HALF_HEAD):
                text = response.read()
                assert flooded.descriptors < 400
            assert text.count(b'"token"') == 90
            assert b'"done":true' in text
            assert until(flooded.answers)
            answer.close()
        finally:
            process.kill()
            process.wait()
            assert process.stdout
            process.stdout.close()


@pytest.mark.parametrize("server", ["node", "gateway"])
def test_silent_connections_before_the_tls_handshake(server: str, tmp_path: Path) -> None:
    """They count from the first moment: the server keeps its file descriptors, and members get their answers."""
    cluster = Cluster(tmp_path / "keys")
    folder, client = cluster.folder_of("d"), Identity(cluster.client)
    arguments = ["serve", "--role", "decode", "--engine", "simulated", "--model", MODEL, "--identity", str(folder)]
    if server == "gateway":
        config = tmp_path / "cluster.json"
        config.write_text(json.dumps({"decode_servers": [{"host": "127.0.0.1", "port": 9, "model": MODEL}]}))
        files = "--tls-cert", str(folder / "node.pem"), "--tls-key", str(folder / "node.key")
        arguments = ["gateway", "--config", str(config), *files]
    with few_files(*arguments, "--port", str(port := free_port())) as (process, _, said):
        flooded, url = Flooded(port, process.pid, ""), f"https://127.0.0.1:{port}/health"
        with held(port, 500, b""):
            assert ask(url, client)[0] == 200
            assert flooded.descriptors < 350
        with Reopened(port, 500) as flood:
            for _ in range(5):
                assert ask(url, client)[0] == 200
                assert flooded.descriptors < 350
                assert flood.goes_on()
        with ExitStack() as stack:  # those that end their handshake, and then send half a head
            for _ in range(200):
                sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), 60))
                with suppress(OSError):
                    tls = client.client_context.wrap_socket(sock, server_hostname="127.0.0.1")
                    stack.enter_context(tls).sendall(HALF_HEAD)
            assert ask(url, client)[0] == 200
        assert until(lambda: flooded.descriptors < 100, 60)
        assert "Too many open files" not in said()


def test_the_ollama_node_has_the_same_limits() -> None:
    """It has the same server: no component makes one of its own."""
    source = Path(__file__).parents[2] / "src" / "disaggregated_inference"
    made = {path.parent.name for path in source.rglob("*.py") if "HttpServer(\n" in path.read_text("utf-8")}
    assert made == {"node", "gateway", "ollama_node"}
    own = [path for path in source.rglob("*.py") if "uvicorn.Config(" in path.read_text("utf-8")]
    assert [path.relative_to(source).as_posix() for path in own if path.parent.name != "bench"] == ["http/server.py"]
