"""A finished response is freed at once. Left to the garbage collector, those that ran during its young collections
would stay for tens of thousands of requests."""

import http.client
from collections.abc import AsyncGenerator, Awaitable, Callable

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from disaggregated_inference.errors import BadRequest, DisaggError
from disaggregated_inference.http import (
    EventStreamResponse,
    error_response,
    json_response,
    read_json,
    sse_event,
    unless_disconnected,
)
from tests.support.garbage import garbage
from tests.support.recorded_ollama import OnThread


async def echo(request: Request) -> Response:
    return json_response(await read_json(request))


async def count(request: Request) -> Response:
    async def events() -> AsyncGenerator[bytes, None]:
        for number in range(3):
            yield sse_event(number)

    return EventStreamResponse(request, events(), lambda error: b"")


async def fail() -> None:
    raise BadRequest("no")


async def refused(request: Request, error: Exception) -> Response:
    return error_response(error)


async def refuse(request: Request) -> Response:
    await unless_disconnected(request, fail())
    return Response()


async def refuse_stream(request: Request) -> Response:
    async def events() -> AsyncGenerator[bytes, None]:
        await fail()
        yield b""

    return EventStreamResponse(request, events(), lambda error: b"")


@pytest.mark.parametrize("app", [echo, count, refuse, refuse_stream])
def test_responses_leave_no_garbage(app: Callable[[Request], Awaitable[Response]]) -> None:
    routes = [Route("/", app, methods=["POST"])]
    server = OnThread(Starlette(routes=routes, exception_handlers={DisaggError: refused}))
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)

    def ask() -> None:
        connection.request("POST", "/", b"{}")
        assert connection.getresponse().read()

    try:
        ask()  # what is made once, such as routes and caches of msgspec
        with garbage() as found:
            for _ in range(5):
                ask()
    finally:
        connection.close()
        server.end()
    assert found == []
