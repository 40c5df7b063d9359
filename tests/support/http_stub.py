"""A server with one route, in place of a node."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from disaggregated_inference.api import CHECKSUM_HEADER, checksum_text
from disaggregated_inference.cluster import Server

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def _prove(request: web.Request, handler: Answer) -> web.StreamResponse:
    """With the checksum of a node's small answers, which are right here: tests of checksums set their own."""
    response = await handler(request)
    if request.method == "GET" and isinstance(response, web.Response) and isinstance(response.body, bytes):
        response.headers.setdefault(CHECKSUM_HEADER, checksum_text(response.body))
    return response


@asynccontextmanager
async def served(path: str, answer: Answer, method: str = "GET") -> AsyncIterator[Server]:
    app = web.Application(middlewares=[_prove])
    app.router.add_route(method, path, answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield Server(name="n", role="decode", host="127.0.0.1", port=port, model="m")
    finally:
        await runner.cleanup()


def echo_app() -> Starlette:
    """Sends every request's body back."""

    async def echo(request: Request) -> Response:
        return Response(await request.body())

    return Starlette(routes=[Route("/", echo, methods=["POST"])])
