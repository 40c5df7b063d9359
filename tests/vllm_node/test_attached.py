"""`--vllm-url` with something else at that address: an error that says what to do, at once if waiting is of no use."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from disaggregated_inference.errors import EngineUnavailable
from disaggregated_inference.timeouts import VllmTimeouts
from disaggregated_inference.vllm_node.attached import AttachedVllm


class _Handler(BaseHTTPRequestHandler):
    status, body = 200, b""

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {})) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (404, b"Not Found", "is no vLLM: it has no /version. Start it with: vllm serve m"),
        (200, b"<html>", "is no vLLM: its /version cannot be decoded. Start it with: vllm serve m"),
        (200, b'{"version": "0.33.0"}', r"vLLM 0.33.0 is not supported, 0.25 to 0.32 are: run vLLM 0.25.1 there"),
        (401, b'{"error": "Unauthorized"}', "vLLM refuses this node's key: set VLLM_API_KEY to the key of that vLLM$"),
    ],
)
def test_what_waiting_does_not_change_is_told_at_once(
    status: int, body: bytes, words: str, server: ThreadingHTTPServer
) -> None:
    handler: type[_Handler] = server.RequestHandlerClass  # type: ignore[assignment]
    handler.status, handler.body = status, body
    with pytest.raises(EngineUnavailable, match=words):
        AttachedVllm(f"http://127.0.0.1:{server.server_port}", "vllm serve m").start()


def test_what_is_waited_for_is_told(server: ThreadingHTTPServer) -> None:
    handler: type[_Handler] = server.RequestHandlerClass  # type: ignore[assignment]
    handler.status, handler.body = 503, b"a proxy says: later"
    steps: list[str] = []
    limit = VllmTimeouts(attach_s=0.5, poll_s=0.01)
    with pytest.raises(EngineUnavailable, match=r"a proxy says: later \(HTTP 503\)\. Start it with: vllm serve m"):
        AttachedVllm(f"http://127.0.0.1:{server.server_port}", "vllm serve m", limit).start(steps.append)
    assert steps == [
        f"waiting for vLLM at http://127.0.0.1:{server.server_port}",
        "vLLM failed: a proxy says: later (HTTP 503)",
    ]
