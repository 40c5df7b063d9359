"""A server in front of a node that passes everything on, and lies where a test tells it to. Its checksums are right: it
is the node that lies, not the line."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from disaggregated_inference.api import CHECKSUM_HEADER, checksum, checksum_text
from tests.support.waiting import until

Lie = Callable[[list[dict[str, Any]]], list[Any]]  # of the events; bytes in the list are sent as they are
_STREAMS = ("/generate", "/decode")


class LyingNode:
    """`lie` alters the events of a stream, `bodies` the JSON of a path. `lies` counts what was altered."""

    def __init__(self, port: int) -> None:
        self.lie: Lie | None = None
        self.bodies: dict[str, Callable[[bytes], bytes]] = {}
        self.lies = 0
        self._target, self.port = f"http://127.0.0.1:{port}", 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "LyingNode":
        self._thread.start()
        assert until(lambda: bool(self.port))
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(20)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._ended = asyncio.Event()
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with aiohttp.ClientSession() as self._session:
            self.port = runner.addresses[0][1]
            await self._ended.wait()
        await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in ("host", "x-checksum")}
        body, url = await request.read(), self._target + request.path
        try:
            async with self._session.request(request.method, url, data=body, headers=headers) as answer:
                content = await answer.read()
        except aiohttp.ClientError:
            return web.Response(status=502)
        if request.path in _STREAMS and answer.status == 200:
            return await self._stream(request, content)
        if alter := self.bodies.get(request.path):
            self.lies, content = self.lies + 1, alter(content)
        proof = {CHECKSUM_HEADER: checksum_text(content)}
        return web.Response(body=content, status=answer.status, headers=proof, content_type="application/json")

    async def _stream(self, request: web.Request, content: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", CHECKSUM_HEADER: "crc32"})
        await response.prepare(request)
        so_far = 0
        for part in self._parts(content):
            so_far = checksum(part, so_far)
            await response.write(b"%b: sum %08x\n\n" % (part, so_far))
        return response

    def _parts(self, content: bytes) -> list[bytes]:
        events = [msgspec.json.decode(line[6:]) for line in content.split(b"\n\n") if line.startswith(b"data: ")]
        if self.lie:
            self.lies, events = self.lies + 1, self.lie(events)
        return [event if isinstance(event, bytes) else b"data: %b\n\n" % msgspec.json.encode(event) for event in events]
