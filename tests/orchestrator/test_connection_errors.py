"""Ports in the config that are no node's: the state says what answers there, and what to do."""

import asyncio
import http.server
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import pytest

from disaggregated_inference.cluster import Server
from disaggregated_inference.node.kv_listener import KVListener
from disaggregated_inference.orchestrator import DisaggregatedInference
from disaggregated_inference.orchestrator.connection_errors import what_answers
from tests.support.cluster import free_port
from tests.support.gateway import served as served_gateway


def why(port: int, **about: Any) -> tuple[str, str]:
    """State and reason of a decode node at this port."""
    entry = {"host": "127.0.0.1", "port": port, "name": "d", "model": "m"} | about
    config = {"decode_servers": [entry], "policies": {"health_timeout_s": 20.0}}

    async def run() -> dict[str, Any]:
        async with DisaggregatedInference(config) as cluster:
            await cluster.health()
            node: dict[str, Any] = (await cluster.status())["nodes"][0]
            return node

    node = asyncio.run(run())
    return node["state"], node["why"]


class Pages(http.server.BaseHTTPRequestHandler):
    pages: ClassVar[dict[str, str]] = {}
    headers_seen: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self.headers_seen.append(self.headers["Authorization"] if self.path != "/status" else None)
        page = self.pages.get(self.path)
        self.send_response(404 if page is None else 200)
        self.end_headers()
        self.wfile.write((page or "404 page not found").encode())

    def log_message(self, *_: Any) -> None:
        """Not in the output of the tests."""


@contextmanager
def serving(server: socketserver.TCPServer) -> Iterator[int]:
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@contextmanager
def web_server(**pages: str) -> Iterator[int]:
    handler = type("Handler", (Pages,), {"pages": {f"/{path}": page for path, page in pages.items()}})
    with serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)) as port:
        yield port


def test_a_gateway() -> None:
    away = {"decode_servers": [{"host": "127.0.0.1", "port": free_port(), "model": "m"}]}
    with served_gateway(away) as url:
        state, reason = why(int(url.rpartition(":")[2]))
    assert state == "unreachable"
    assert reason.endswith("a gateway answers there, not a node: write the host and port of a `disagg serve`")


def test_an_ollama() -> None:
    with web_server(**{"": "Ollama is running"}) as port:
        _, reason = why(port)
        command = f"`disagg serve --engine ollama --ollama-host http://127.0.0.1:{port}`"
    assert reason.endswith(f"an Ollama answers there, not a node: start a node in front of it: {command}")


@pytest.mark.parametrize("status", ["<!DOCTYPE HTML>", '{"status": 5}', "[]", None])
def test_a_web_server(status: str | None) -> None:
    with web_server(**({"status": status} if status else {})) as port:
        state, reason = why(port, token="secret")
    assert state == "unreachable"
    assert reason.startswith("it does not answer as a node: ")
    assert "; a web server (BaseHTTP/" in reason
    assert reason.endswith(" answers there, not a node: write the host and port of a `disagg serve`")
    assert "Bearer secret" not in Pages.headers_seen  # only the poll itself carries the token


def test_a_node_that_says_something_odd_is_no_stranger() -> None:
    with web_server(health='{"status": "healthy", "role": "decode"}') as port:
        assert why(port)[1] == "it does not answer as a node: HTTP 404"


def test_another_server_of_the_openai_api() -> None:
    with web_server(**{"v1/models": "{}"}) as port:
        assert "a server of the OpenAI API answers there, not a node" in why(port)[1]


def test_a_server_that_stalls_or_dies_is_not_identified() -> None:
    async def run(port: int) -> str:
        server = Server(name="d", role="decode", host="127.0.0.1", port=port, model="m")
        async with aiohttp.ClientSession() as session:
            return await what_answers(session, server, timeout_s=0.3)

    with socket.create_server(("127.0.0.1", 0)) as sock:  # accepts, and never answers
        assert asyncio.run(run(sock.getsockname()[1])) == ""
    assert asyncio.run(run(free_port())) == ""


def test_a_kv_port() -> None:
    listener = KVListener([("127.0.0.1", 0)], lambda sock: sock.close(), 4)
    port = listener.addresses[0][1]
    reason = why(port)[1]
    listener.close()
    assert reason.startswith("it cannot be reached: ")
    assert f"is {port} its HTTP port, not its KV port?" in reason or "reset" in reason.lower()


def test_a_server_that_speaks_no_http() -> None:
    class Banner(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
            self.request.recv(1000)

    with serving(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Banner)) as port:
        assert why(port)[1] == (
            f"it cannot be reached: 127.0.0.1:{port} does not speak HTTP; write the HTTP port of the node"
        )


def test_nothing_there() -> None:
    port = free_port()
    assert why(port)[1] == "it cannot be reached: connection refused"
    reason = why(port, host="no-such-host.invalid")[1]
    assert "no address is known for the host no-such-host.invalid" in reason


def test_no_tls_there() -> None:
    with web_server() as port:
        reason = why(port, tls=True)[1]
    assert reason.startswith("it cannot be reached: TLS failed: ")
    assert reason.endswith("; check `tls` in its entry")


SNIPPET = """
import asyncio
from disaggregated_inference.orchestrator import DisaggregatedInference

async def main():
    orchestrator = DisaggregatedInference({"decode_servers": [{"host": "127.0.0.1", "port": PORT, "model": "qwen"}]})
    try:
        await orchestrator.generate(prompt="def fibonacci(n):", model_type="qwen", max_tokens=100)
    except Exception as error:
        print(error)

asyncio.run(main())
"""


@pytest.mark.slow
def test_the_documents_snippet_leaves_nothing_open(tmp_path: Path) -> None:
    """It never closes its orchestrator."""
    script = tmp_path / "snippet.py"
    script.write_text(SNIPPET.replace("PORT", str(free_port())))
    command = [sys.executable, "-W", "error::ResourceWarning", str(script)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.stdout.startswith("Decode server unavailable - request failed")
    assert "Unclosed" not in run.stderr
    assert "Traceback" not in run.stderr
