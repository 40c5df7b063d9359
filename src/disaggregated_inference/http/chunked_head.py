"""The head of a streamed response, written in one piece.

h11 checks every header of it three times, which takes longer than all its other work on a short response. Here one
expression checks all of them. h11 gets a head as well, without those headers, because it must know what follows.
Everything else goes h11's way, also a head that it would refuse.
"""

import re
from collections.abc import Iterable

import h11
from starlette.types import Message
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

_STREAM = h11.Response(status_code=200, headers=[("Transfer-Encoding", "chunked")], reason="OK")
_FRAMING = frozenset({b"content-length", b"transfer-encoding", b"connection"})
_TOKEN, _VISIBLE = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+", rb"[!-~\x80-\xff]"
_VALUE = rb"(?:%b(?:[\t -~\x80-\xff]*%b)?)?" % (_VISIBLE, _VISIBLE)
_HEAD = re.compile(rb"HTTP/1\.1 200 OK\r\n(?:%b: %b\r\n)*\r\n" % (_TOKEN, _VALUE))

Headers = Iterable[tuple[bytes, bytes]]


class ChunkedHeads:
    """What an app sends for one request, on its way to uvicorn."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    async def send(self, message: Message) -> None:
        if not self._begin(message):
            await RequestResponseCycle.send(self._cycle, message)  # type: ignore[arg-type]

    def _begin(self, message: Message) -> bool:
        """False: nothing was written."""
        cycle = self._cycle
        if cycle.response_started or message["type"] != "http.response.start" or message["status"] != 200:
            return False
        if cycle.disconnected or cycle.flow.write_paused or not _keeps_connection(cycle.scope["headers"]):
            return False
        head = chunked_head([*cycle.default_headers, *message.get("headers", ())])
        if head is None:
            return False
        cycle.response_started, cycle.waiting_for_100_continue = True, False
        cycle.conn.send(_STREAM)
        cycle.transport.write(head)
        return True


def _keeps_connection(headers: Headers) -> bool:
    return all(name != b"connection" or value.lower() == b"keep-alive" for name, value in headers)


def chunked_head(headers: Headers) -> bytes | None:
    """None: these headers are not those of a stream, or not valid."""
    parts = [b"HTTP/1.1 200 OK\r\n"]
    for name, value in headers:
        if name.lower() in _FRAMING:
            return None
        parts.append(b"%b: %b\r\n" % (name, value))
    parts.append(b"Transfer-Encoding: chunked\r\n\r\n")
    head = b"".join(parts)
    is_valid = _HEAD.fullmatch(head) and head.count(b"\n") == len(parts) + 1
    return head if is_valid else None
