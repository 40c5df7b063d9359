"""Streams that stay alive, and work that ends when its client disconnects."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from disaggregated_inference.errors import Cancelled, DisaggError
from disaggregated_inference.http.body import http_timeouts
from disaggregated_inference.http.body_writer import body_writer
from disaggregated_inference.timeouts import HttpTimeouts

log = logging.getLogger(__name__)

UNBUFFERED_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # else a proxy may hold a stream back
KEEPALIVE_COMMENT = b": keep-alive\n\n"  # readers of server-sent events skip comments

Result = TypeVar("Result")
DescribeError = Callable[[Exception], bytes]


def sse_event(content: Any) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(content)


def sse_comment(text: str) -> bytes:
    """Readers of server-sent events skip it; people see it."""
    return b": %b\n\n" % " ".join(text.split()).encode()


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
        del working  # it has the error, whose traceback holds this frame


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStreamResponse(Response):
    """`events` as a response. An error within a moment and before the first event gets its own HTTP status. A later
    error becomes the last event, by `describe_error`. `headers` is called after that moment, when the plan is known.
    `opening` is sent together with the headers, `keepalive` whenever there is nothing else to send.

    A task of its own sends the events. Each of them wakes it up, and that costs less than to wake the request's task,
    which is deep within calls of middleware. The request's task watches the client and the clock."""

    def __init__(
        self,
        request: Request,
        events: AsyncGenerator[bytes, None],
        describe_error: DescribeError,
        headers: Callable[[], dict[str, str]] = dict,
        keepalive: bytes | Callable[[], bytes] = KEEPALIVE_COMMENT,
        media_type: str = "text/event-stream",
        opening: Callable[[], bytes] = bytes,
        timeouts: HttpTimeouts | None = None,
    ) -> None:
        self.status_code, self.media_type, self.background = 200, media_type, None
        self._events, self._describe_error, self._make_headers = events, describe_error, headers
        self._keepalive = keepalive if callable(keepalive) else lambda: keepalive
        self._opening, self._timeouts = opening, timeouts or http_timeouts(request)
        self._started = self._sending = False
        self._deadline: asyncio.Timeout | None = None  # of the present wait for the client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._sent_at, self._write = time.monotonic(), body_writer(scope)
        sending = asyncio.create_task(self._send_events(send))
        sending.add_done_callback(self._wake)
        try:
            await self._watch(receive, send, sending)
        finally:
            client_left = not sending.done()
            if client_left:
                sending.cancel()
                await asyncio.wait({sending})
            failed = not sending.cancelled() and sending.exception() is not None
            await self._events.aclose()
        try:
            if failed or not client_left:
                sending.result()
        finally:
            del sending  # it has the error, whose traceback holds this frame

    async def _send_events(self, send: Send) -> None:
        try:
            async for event in self._events:
                if self._started and self._write(event):
                    self._sent_at = time.monotonic()
                else:
                    await self._send(send, event)
        except Exception as error:
            if not self._started or self._sending:  # a client without a socket gets no last event
                raise
            if not isinstance(error, DisaggError):
                log.error("a stream failed", exc_info=error)
            await self._send(send, self._describe_error(error))
        await self._send(send, b"", more_body=False)

    async def _send(self, send: Send, event: bytes, *, more_body: bool = True) -> None:
        self._sent_at, self._sending = time.monotonic(), True
        if not self._started:
            event = await self._start(send) + event
        if event or not more_body:
            await send({"type": "http.response.body", "body": event, "more_body": more_body})
        self._sending = False

    async def _start(self, send: Send) -> bytes:
        self._started = True
        self.init_headers(UNBUFFERED_HEADERS | self._make_headers())
        opening = self._opening()
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        return opening

    async def _watch(self, receive: Receive, send: Send, sending: "asyncio.Task[None]") -> None:
        """Until all is sent, or the client disconnects. Sends what is due while there are no events."""
        loop, left = asyncio.get_running_loop(), False
        while not left and not sending.done():
            with suppress(TimeoutError):
                async with asyncio.timeout_at(loop.time() + self._due_s()) as self._deadline:
                    left = (await receive())["type"] == "http.disconnect"
            self._deadline = None
            if not left and not sending.done() and self._due_s() <= 0:
                await self._send(send, self._keepalive() if self._started else b"")

    def _wake(self, _: object) -> None:
        """All is sent: the wait for the client ends."""
        if self._deadline and not self._deadline.expired():
            self._deadline.reschedule(0)

    def _due_s(self) -> float:
        limit_s = self._timeouts.keepalive_s if self._started else self._timeouts.early_error_s
        return self._sent_at + limit_s - time.monotonic()
