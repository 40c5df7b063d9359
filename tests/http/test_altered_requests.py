"""Requests of an orchestrator, altered at random on their way to a node: the node sees what was sent, or refuses it."""

import asyncio
from contextlib import suppress

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from disaggregated_inference.api import CHECKSUM_HEADER, DecodeRequest, PrefillRequest, checksum_text
from disaggregated_inference.errors import DisaggError
from disaggregated_inference.http import error_response, json_response, read_body
from disaggregated_inference.timeouts import HttpTimeouts
from tests.support.alterations import TIMES, altered, http_parts
from tests.support.recorded_ollama import OnThread

CONTEXT = "eyJ0aWNrZXQiOiJhIn0=." + "QUJD" * 60  # opaque to all but the two nodes
ASKED: dict[str, PrefillRequest | DecodeRequest] = {
    "/generate": DecodeRequest(
        tokens=list(range(40)), max_tokens=12, temperature=0.7, seed=5, stop=("a", "b"), stream=True
    ),
    "/decode": DecodeRequest(context=CONTEXT, tokens=list(range(40)), max_tokens=12, temperature=0.7, stream=True),
    "/prefill": PrefillRequest(
        tokens=list(range(40)), ticket="t1", wait=False, kv_addresses=("10.0.0.7:9000",), cache_salt="a"
    ),
}
CASES = 1000  # of each


def head_of(path: str, body: bytes) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: node:8100\r\nAuthorization: Bearer secret\r\nX-Request-Id: r1\r\n"
        f"Content-Type: application/json\r\n{CHECKSUM_HEADER}: {checksum_text(body)}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()


@pytest.mark.slow
@pytest.mark.parametrize("path", ASKED)
def test_altered_requests(path: str) -> None:
    asked, seen = ASKED[path], list[object]()
    body = msgspec.json.encode(asked)
    head = head_of(path, body)

    async def take(request: Request) -> Response:
        seen.append(await read_body(request, type(asked)))
        return json_response({})

    async def refused(request: Request, error: Exception) -> Response:
        return error_response(error)

    app = Starlette(routes=[Route(path, take, methods=["POST"])], exception_handlers={DisaggError: refused})

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
        whole = head + body
        parts = http_parts(whole, "key", "value", "checksum", "length")
        assert b" 200 " in await send(port, whole)
        return [await send(port, content) for content in altered(whole, CASES, seed=4, parts=parts)]

    server = OnThread(app, HttpTimeouts(read_s=5.0))
    try:
        answers = asyncio.run(run(server.port))
    finally:
        server.end()
    assert all(request == asked for request in seen)
    assert 1 < len(seen) < CASES * TIMES * 0.6
    assert not any(b" 500 " in answer[:20] for answer in answers)
