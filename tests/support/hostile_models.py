"""A server between the grader and a gateway that alters what the models say: a model that was talked over."""

import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_HOLD_S = 600.0  # for an answer of the embedded model on a busy machine

Alter = Callable[[dict[str, Any]], dict[str, Any]]


@contextmanager
def hostile_models(gateway: str, alter: Alter) -> Iterator[str]:
    """Its URL, which ends in /v1. `gateway`: of the real models. `alter`: from their JSON answer to another."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(self._asked(None))

        def do_POST(self) -> None:
            reply = self._asked(self.rfile.read(int(self.headers["Content-Length"])))
            message = reply["choices"][0]["message"]
            message["content"] = json.dumps(alter(json.loads(message["content"])))
            self._send(reply)

        def _asked(self, body: bytes | None) -> dict[str, Any]:
            url = gateway + self.path.removeprefix("/v1")
            headers = {"Content-Type": "application/json", "X-Disagg-Metrics": "1"}
            with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=_HOLD_S) as answer:
                reply: dict[str, Any] = json.load(answer)
                return reply

        def _send(self, reply: dict[str, Any]) -> None:
            content = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
