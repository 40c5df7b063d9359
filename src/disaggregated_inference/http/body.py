"""Request bodies: one set of limits for their size and for the time in which they must arrive."""

import asyncio
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from disaggregated_inference.api import CHECKSUM_HEADER, checksum_text, invalid
from disaggregated_inference.errors import BadRequest, BodyTooLarge, Cancelled, RequestDamaged, RequestTooSlow
from disaggregated_inference.http.body_writer import request_is_here
from disaggregated_inference.http.limits import UnfinishedBodies
from disaggregated_inference.timeouts import HttpTimeouts

BODY_LIMIT_BYTES = 16 << 20
_SLOWEST_BYTES_S = 16 << 10  # each received portion of this size adds a second to the deadline

Body = TypeVar("Body")


async def read_body(request: Request, kind: type[Body], limit_bytes: int = BODY_LIMIT_BYTES) -> Body:
    """The JSON body as `kind`. The content type does not matter: many programs leave it out."""
    body = await _receive(request, limit_bytes)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise invalid(error, kind) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error


async def read_json(request: Request) -> dict[str, Any]:
    """The body as a JSON object of any content."""
    return await read_body(request, dict[str, Any])


async def _receive(request: Request, limit_bytes: int) -> bytes | bytearray:
    _require_size(_announced_bytes(request), limit_bytes)
    receive = _arrived(request) if request_is_here(request.scope) else _arriving(request, limit_bytes)
    body: bytes | bytearray = await receive
    _require_size(len(body), limit_bytes)
    if (sent := request.headers.get(CHECKSUM_HEADER)) and sent != checksum_text(body):
        raise RequestDamaged("the request body was damaged on the way: its checksum differs; send it again")
    return body


async def _arrived(request: Request) -> bytes:
    """Without a deadline: `receive` does not wait."""
    message = await request.receive()
    if message["type"] != "http.request" or message.get("more_body"):
        raise Cancelled("the client disconnected")
    body: bytes = message.get("body", b"")
    return body


async def _arriving(request: Request, limit_bytes: int) -> bytearray:
    body, until = bytearray(), asyncio.get_running_loop().time() + http_timeouts(request).read_s
    unfinished: UnfinishedBodies = getattr(request.app.state, "unfinished_bodies", None) or UnfinishedBodies()
    try:
        with unfinished.receiving(body):
            async with asyncio.timeout_at(until) as deadline:
                async for part in request.stream():
                    unfinished.add(body, part)
                    _require_size(len(body), limit_bytes)
                    deadline.reschedule(until + len(body) / _SLOWEST_BYTES_S)
    except ClientDisconnect:
        raise Cancelled("the client disconnected") from None
    except TimeoutError:
        raise RequestTooSlow("the request body did not arrive in time: send it faster, or send less") from None
    return body


def _require_size(size_bytes: int, limit_bytes: int) -> None:
    if size_bytes > limit_bytes:
        raise BodyTooLarge(f"the request body is larger than {limit_bytes} bytes")


def _announced_bytes(request: Request) -> int:
    """0 without a usable Content-Length: then the body is counted as it arrives."""
    header = request.headers.get("content-length", "")
    return int(header[:20]) if header.isascii() and header.isdigit() else 0


def http_timeouts(request: Request, usual: HttpTimeouts = HttpTimeouts()) -> HttpTimeouts:
    """What the app was configured with; in an app without our server, the usual ones."""
    timeouts: HttpTimeouts = getattr(request.app.state, "http_timeouts", usual)
    return timeouts
