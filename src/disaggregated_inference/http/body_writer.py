"""Parts of a streamed response, written straight to the connection.

The usual way of a part takes a message, a coroutine for each middleware, and an event of h11. For a token that is more
than all its other work. A middleware that changes bodies must take the writer out of the scope.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

_NAME = "disagg.body_writer"  # in ASGI's dict of what a server can do beyond the standard

WriteBody = Callable[[bytes], bool]


class BodyWriter:
    """Of one response, whose head was sent with `Transfer-Encoding: chunked`."""

    __slots__ = ("_cycle", "_transport")

    def __init__(self, cycle: RequestResponseCycle, transport: asyncio.Transport) -> None:
        self._cycle, self._transport = cycle, transport

    def __call__(self, part: bytes) -> bool:
        """False: nothing was written, and the usual way knows what to do."""
        cycle = self._cycle
        if not part or not cycle.response_started or cycle.response_complete:
            return False
        if cycle.disconnected or cycle.flow.write_paused:
            return False
        self._transport.write(b"%x\r\n%b\r\n" % (len(part), part))
        return True

    @property
    def request_is_here(self) -> bool:
        return not self._cycle.more_body and not self._cycle.disconnected


def has_chunks(scope: Scope) -> bool:
    """Only HTTP/1.1 has them, and a response to HEAD has no body."""
    return bool(scope["http_version"] == "1.1" and scope["method"] != "HEAD")


@contextmanager
def offered_body_writer(scope: Scope, cycle: RequestResponseCycle) -> Iterator[None]:
    """For a request whose response has chunks. In the end the scope must let go of the writer, which knows the cycle,
    which knows the scope: only a garbage collection would find them, and all that the request had."""
    scope["extensions"] = {_NAME: BodyWriter(cycle, cycle.transport)}
    try:
        yield
    finally:
        del scope["extensions"]


def body_writer(scope: Scope) -> WriteBody:
    """For a response without a Content-Length, once its head was sent."""
    found: WriteBody = scope.get("extensions", {}).get(_NAME, _unable)
    return found


def request_is_here(scope: Scope) -> bool:
    """Whether the body of the request has come completely: then nothing has to be waited for. Most bodies come together
    with their head."""
    return getattr(scope.get("extensions", {}).get(_NAME), "request_is_here", False)


def without_body_writer(scope: Scope) -> Scope:
    return {**scope, "extensions": {name: each for name, each in scope.get("extensions", {}).items() if name != _NAME}}


def _unable(part: bytes) -> bool:
    return False
