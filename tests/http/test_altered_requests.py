"""Requests of an orchestrator, altered at random on their way to a node: the node sees what was sent, or refuses it."""

import asyncio
from contextlib import suppress

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from disaggregated_inference.api import CHECKSUM_HEADER, DecodeRequest, checksum_text
from disaggregated_inference.errors import DisaggError
from disaggregated_inference.http import error_response, json_response, read_body
from disaggregated_inference.timeouts import HttpTimeouts
from tests.support.alterations import altered
from tests.support.recorded_ollama import OnThread

ASKED = DecodeRequest(tokens=list(range(40)), max_tokens=12, temperature=0.7, seed=5, stop=("a", "b"), stream=True)
BODY = msgspec.json.encode(ASKED)
HEAD = (
    "POST /generate HTTP/1.1\r\nHost: node:8100\r\nAuthorization: Bearer secret\r\nX-Request-Id: r1\r\n"
    f"Content-Type: application/json\r\n{CHECKSUM_HEADER}: {checksum_text(BODY)}\r\nContent-Length: {len(BODY)}\r\n\r\n"
).encode()


@pytest.mark.slow
def test_altered_requests() -> None:
    seen: list[DecodeRequest] = []

    async def generate(request: Request) -> Response:
        seen.append(await read_body(request, DecodeRequest))
        return json_response({})

    async def refused(request: Request, error: Exception) -> Response:
        return error_response(error)

    app = Starlette(routes=[Route("/generate", generate, methods=["POST"])], exception_handlers={DisaggError: refused})

    async def send(port: int, content: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        answer = b""
        with suppress(ConnectionError):
            writer.write(content)
            writer.write_eof()
            answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        return answer

    async def run(port: int) -> list[bytes]:
        whole, parts = HEAD + BODY, [(0, len(HEAD)), (len(HEAD), len(HEAD + BODY)), (len(HEAD), len(HEAD + BODY))]
        assert b" 200 " in await send(port, whole)
        return [await send(port, content) for content in altered(whole, 2500, seed=4, parts=parts)]

    server = OnThread(app, HttpTimeouts(read_s=5.0))
    try:
        answers = asyncio.run(run(server.port))
    finally:
        server.end()
    assert all(request == ASKED for request in seen)
    assert 1 < len(seen) < 1500
    assert not any(b" 500 " in answer[:20] for answer in answers)
