"""How long a request may take to arrive. uvicorn has no such limit: whoever sends a byte now and then would keep its
place for ever, and a thousand of them would keep everybody else out.

A request's head must be whole within `read_s` of the connection's beginning, or of the first byte after the last
answer. Its body gets as long, and a second more for every so many bytes that came. How long an answer takes is
nobody's business here.
"""

import asyncio

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from disaggregated_inference.errors import BodyTooLarge, RequestTooSlow
from disaggregated_inference.http.sse import BODY_LIMIT_BYTES

READ_S = 20.0
_SLOWEST_BYTES_S = 16 << 10


def protocol_within(read_s: float) -> type[asyncio.Protocol]:
    """For uvicorn: its own protocol, with a deadline for heads."""
    return type("HttpWithin", (_HeadDeadline,), {"read_s": read_s})


class _HeadDeadline(H11Protocol):
    """While a request is being answered no clock runs. On h11, also where httptools is installed: that reads heads of
    any length, and forgets the answer to a request that noise comes after."""

    read_s: float
    _heard = False
    _over: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        self._heard = True
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP has no path either: the shape is the one that unknown paths have. After an answer has begun
        nothing more can be said."""
        if not self.cycle or self.cycle.response_complete or not self.cycle.response_started:
            self._say(400, "Bad Request", "this is not an HTTP request")
        self.transport.close()

    def _watch(self) -> None:
        """Also where an answer was given before its request was read to the end: what is left of it is read and
        dropped, but not for ever."""
        if self.transport.is_closing() or (self.cycle and not self.cycle.response_complete):
            self._stop()
        elif not self._over:
            self._over = self.loop.call_later(self.read_s, self._expire)

    def _stop(self) -> None:
        if self._over:
            self._over.cancel()
            self._over = None

    def _expire(self) -> None:
        self._over = None
        if self._heard and not self.cycle:  # who said nothing is told nothing: it might take it for its first answer
            self._say(408, "Request Timeout", f"the request's head was not whole within {self.read_s:g} s")
        self.transport.close()

    def _say(self, status: int, reason: str, message: str) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        body = msgspec.json.encode({"error": error})
        head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"Connection: close\r\n\r\n" + body)


class BodyDeadline:
    """Whoever reads the body is told that it did not come, or that more is announced than is taken, so that the
    refusal has the shape of the API."""

    def __init__(self, app: ASGIApp, read_s: float = READ_S) -> None:
        self._app, self._read_s = app, read_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            receive = _Body(receive, self._read_s, announced_bytes(scope)).receive
        await self._app(scope, receive, send)


class _Body:
    def __init__(self, receive: Receive, read_s: float, announced: int) -> None:
        self._receive, self._announced, self._whole = receive, announced, False
        self._until = asyncio.get_running_loop().time() + read_s

    async def receive(self) -> Message:
        if self._whole:
            return await self._receive()
        if self._announced > BODY_LIMIT_BYTES:
            raise BodyTooLarge(f"a request body of {self._announced} bytes: up to {BODY_LIMIT_BYTES} are taken")
        try:
            async with asyncio.timeout_at(self._until):
                return self._counted(await self._receive())
        except TimeoutError:
            self._whole = True
            raise RequestTooSlow("the request's body did not come in time: send it faster, or less of it") from None

    def _counted(self, message: Message) -> Message:
        self._until += len(message.get("body", b"")) / _SLOWEST_BYTES_S
        self._whole = not message.get("more_body", False)
        return message


def announced_bytes(scope: Scope) -> int:
    """0 where nobody said: such a body is counted as it comes."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value[:20])
    return 0
