"""An endpoint that is not ours: what it does not tell is not made up."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from grader.models import HttpEndpoint, Question

_ASKED = Question(model="other", messages=[], schema={}, seed=1, temperature=0.0, max_tokens=10, timeout_s=60.0)


class _Foreign(ThreadingHTTPServer):
    """Shaped as other servers: names, and a system_fingerprint that says nothing about weights."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.paths: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._send({"object": "list", "data": [{"id": "other", "object": "model", "root": "other-7b"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        message = {"message": {"role": "assistant", "content": "{}"}}
        self._send({"model": "other-7b", "system_fingerprint": "fp_1", "choices": [message]})

    def _send(self, body: dict[str, Any]) -> None:
        assert isinstance(self.server, _Foreign)
        self.server.paths.append(self.path)
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Not to the terminal."""


@pytest.fixture
def foreign() -> Iterator[_Foreign]:
    with _Foreign() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_weights_that_are_not_told_are_not_made_up(foreign: _Foreign) -> None:
    """Neither names nor a system_fingerprint are hashes of weights. Who does not tell them is asked once."""
    endpoint = HttpEndpoint(f"http://127.0.0.1:{foreign.server_port}/v1")
    figures = [endpoint.ask(_ASKED).figures for _ in range(2)]
    assert [one.weights for one in figures] == [(), ()]
    assert figures[0].served_model == "other-7b"
    assert foreign.paths == ["/v1/chat/completions", "/v1/models", "/v1/chat/completions"]
