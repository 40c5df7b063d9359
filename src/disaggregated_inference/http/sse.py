"""HTTP that all adapters share: bodies, streams that stay alive, and clients that leave."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from disaggregated_inference.errors import BadRequest, BodyTooLarge, Cancelled

BODY_LIMIT_BYTES = 16 << 20
UNBUFFERED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # a proxy that collects a stream shows none
COMMENT = b": keep-alive\n\n"  # in events: their readers skip it
_PULSE_S = 5.0  # on the wall clock, whatever the model does: proxies and clients give up on silence; see --keepalive

Result = TypeVar("Result")


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")


async def body_of(request: Request, limit_bytes: int = BODY_LIMIT_BYTES) -> dict[str, Any]:
    """A JSON object, whatever the content type says: half of all programs forget it."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit_bytes:
            raise BodyTooLarge(f"a request body of more than {limit_bytes} bytes")
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise BadRequest("the body must be a JSON object")
    return content


async def unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """A client that leaves while it waits cancels what it waits for, streamed or not."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Cancelled("the client is gone")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


Describe = Callable[[Exception], bytes]


async def streamed(
    request: Request,
    lines: AsyncGenerator[bytes, None],
    describe: Describe,
    headers: Callable[[], dict[str, str]] = dict,
    pulse: bytes | Callable[[], bytes] = COMMENT,
    media_type: str = "text/event-stream",
    patience_s: float = 0.25,
    opening: Callable[[], bytes] = bytes,
) -> Response:
    """`lines` as a response. What fails within a moment, before the first line, has a status of its own (the error is
    raised here), and `headers` is asked for after that moment: by then the plan is known. Later, and after the first
    line, `describe` makes the last line of it. `pulse` goes out where nothing else does, and `opening` with the
    headers: what can be said before there is a first line."""
    first = asyncio.ensure_future(anext(lines, b""))
    try:
        await asyncio.wait({first}, timeout=patience_s)
        if first.done():
            first.result()
    except BaseException:
        first.cancel()
        raise
    pulse_s = getattr(request.app.state, "keepalive_s", _PULSE_S)
    beat = pulse if callable(pulse) else lambda: pulse
    about: dict[str, Any] = {"headers": UNBUFFERED | headers(), "media_type": media_type}
    return _SSEResponse(first, lines, describe, beat, pulse_s, opening, **about)


class _SSEResponse(StreamingResponse):
    """Never silent for long: the pulse has a task of its own, so that lines need none, and pass by no queue."""

    def __init__(
        self,
        first: "asyncio.Future[bytes]",
        lines: AsyncGenerator[bytes, None],
        describe: Describe,
        pulse: Callable[[], bytes],
        pulse_s: float,
        opening: Callable[[], bytes],
        **more: Any,
    ) -> None:
        super().__init__(lines, **more)
        self._first, self._lines, self._describe = first, lines, describe
        self._pulse, self._pulse_s, self._opening = pulse, pulse_s, opening
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:  # a client may have left before anything was told, or between two lines
            self._first.cancel()
            await asyncio.wait({self._first})
            await self._lines.aclose()

    async def stream_response(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._sent_at = time.monotonic()
        beating = asyncio.create_task(self._beat(send))
        try:
            async for line in self._told():
                await self._say(send, line)
        finally:
            beating.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _told(self) -> AsyncGenerator[bytes, None]:
        """The description of what failed is the last of it. That sending fails is no part of this: nobody is there then
        to be told."""
        if opening := self._opening():
            yield opening
        try:
            yield await self._first
            async for line in self._lines:
                yield line
        except Exception as error:
            yield self._describe(error)

    async def _say(self, send: Send, line: bytes) -> None:
        self._sent_at = time.monotonic()
        await send({"type": "http.response.body", "body": line, "more_body": True})

    async def _beat(self, send: Send) -> None:
        while True:
            quiet_s = time.monotonic() - self._sent_at
            if quiet_s < self._pulse_s:
                await asyncio.sleep(self._pulse_s - quiet_s)
            else:
                await self._say(send, self._pulse())
