"""Streams that stay alive, and work that ends when its client disconnects."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from disaggregated_inference.errors import Cancelled, DisaggError
from disaggregated_inference.http.body import http_timeouts
from disaggregated_inference.timeouts import HttpTimeouts

log = logging.getLogger(__name__)

UNBUFFERED_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # else a proxy may hold a stream back
KEEPALIVE_COMMENT = b": keep-alive\n\n"  # readers of server-sent events skip comments

Result = TypeVar("Result")
DescribeError = Callable[[Exception], bytes]


def sse_event(content: Any) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(content)


async def unless_disconnected(
    request: Request, work: Awaitable[Result], cancel: Callable[[], object] | None = None
) -> Result:
    """The result of `work`. When the client disconnects first, the work ends: by `cancel`, which may block and runs on
    a thread, or else by cancelling its task."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if cancel:
            await asyncio.to_thread(cancel)
            await asyncio.wait({working})
            working.exception()
        raise Cancelled("the client disconnected")
    except asyncio.CancelledError:
        if cancel:
            cancel()
        raise
    finally:
        leaving.cancel()
        if not cancel:
            working.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def stream_response(
    request: Request,
    events: AsyncGenerator[bytes, None],
    describe_error: DescribeError,
    headers: Callable[[], dict[str, str]] = dict,
    keepalive: bytes | Callable[[], bytes] = KEEPALIVE_COMMENT,
    media_type: str = "text/event-stream",
    opening: Callable[[], bytes] = bytes,
    timeouts: HttpTimeouts | None = None,
) -> Response:
    """`events` as a response. An error within a moment and before the first event is raised here, and gets its own
    HTTP status. A later error becomes the last event, by `describe_error`. `headers` is called after that moment, when
    the plan is known. `opening` is sent together with the headers, `keepalive` whenever there is nothing else to send.
    """
    timeouts = timeouts or http_timeouts(request)
    first = asyncio.ensure_future(anext(events, b""))
    try:
        await asyncio.wait({first}, timeout=timeouts.early_error_s)
        if first.done():
            first.result()
    except BaseException:
        first.cancel()
        raise
    send_alive = keepalive if callable(keepalive) else lambda: keepalive
    options: dict[str, Any] = {"headers": UNBUFFERED_HEADERS | headers(), "media_type": media_type}
    return _StreamResponse(first, events, describe_error, send_alive, timeouts.keepalive_s, opening, **options)


class _StreamResponse(StreamingResponse):
    """The keep-alive has its own task, so events pass no queue."""

    def __init__(
        self,
        first: "asyncio.Future[bytes]",
        events: AsyncGenerator[bytes, None],
        describe_error: DescribeError,
        keepalive: Callable[[], bytes],
        keepalive_s: float,
        opening: Callable[[], bytes],
        **options: Any,
    ) -> None:
        super().__init__(events, **options)
        self._first, self._events, self._describe_error = first, events, describe_error
        self._keepalive, self._keepalive_s, self._opening = keepalive, keepalive_s, opening
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:  # the client may have left before the first event, or between two
            self._first.cancel()
            await asyncio.wait({self._first})
            await self._events.aclose()

    async def stream_response(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._sent_at = time.monotonic()
        keepalive = asyncio.create_task(self._send_keepalives(send))
        try:
            async for event in self._all_events():
                await self._send(send, event)
        finally:
            keepalive.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _all_events(self) -> AsyncGenerator[bytes, None]:
        """The last one describes the error, if there was one. Errors of sending do not come through here."""
        if opening := self._opening():
            yield opening
        try:
            yield await self._first
            async for event in self._events:
                yield event
        except Exception as error:
            if not isinstance(error, DisaggError):
                log.error("a stream failed", exc_info=error)
            yield self._describe_error(error)

    async def _send(self, send: Send, event: bytes) -> None:
        self._sent_at = time.monotonic()
        await send({"type": "http.response.body", "body": event, "more_body": True})

    async def _send_keepalives(self, send: Send) -> None:
        while True:
            quiet_s = time.monotonic() - self._sent_at
            if quiet_s < self._keepalive_s:
                await asyncio.sleep(self._keepalive_s - quiet_s)
            else:
                await self._send(send, self._keepalive())
