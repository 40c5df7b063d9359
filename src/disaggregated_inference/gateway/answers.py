"""HTTP that all adapters share: bodies, streams that stay alive, and clients that leave."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from disaggregated_inference.errors import BadRequest, BodyTooLarge, Cancelled

BODY_LIMIT_BYTES = 16 << 20
_PULSE_S = 5.0  # on the wall clock, whatever the model does: proxies and clients give up on silence

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
Item = bytes | Exception | None  # a line, why there are no more, or that it was the last


async def streamed(
    request: Request,
    lines: AsyncGenerator[bytes, None],
    describe: Describe,
    headers: Callable[[], dict[str, str]] = dict,
    pulse: bytes = b": keep-alive\n\n",
    media_type: str = "text/event-stream",
    patience_s: float = 0.25,
) -> Response:
    """`lines` as a response. What fails within a moment, before the first line, has a status of its own (the error is
    raised here), and `headers` is asked for after that moment: by then the plan is known. Later, and after the first
    line, `describe` makes the last line of it. `pulse` goes out where nothing else does; empty: never."""
    queue: asyncio.Queue[Item] = asyncio.Queue()

    async def pump() -> None:
        try:
            async for line in lines:
                queue.put_nowait(line)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)
        finally:
            await lines.aclose()

    pumping = asyncio.create_task(pump())
    first: list[Item] = []
    try:
        async with asyncio.timeout(patience_s):
            first.append(await queue.get())
    except TimeoutError:
        pass
    except BaseException:
        pumping.cancel()
        raise
    if first and isinstance(first[0], Exception):
        await asyncio.wait({pumping})
        raise first[0]

    async def out() -> AsyncGenerator[bytes, None]:
        waiting = list(first)
        try:
            while True:
                waiting = waiting or await _some(queue, pulse)
                lines = [item for item in waiting if isinstance(item, bytes)]
                if lines:
                    yield b"".join(lines)
                if isinstance(waiting[-1], Exception):
                    yield describe(waiting[-1])
                if not isinstance(waiting[-1], bytes):
                    return
                waiting = []
        finally:
            pumping.cancel()
            await asyncio.wait({pumping})

    return StreamingResponse(out(), headers=headers(), media_type=media_type)


async def _some(queue: "asyncio.Queue[Item]", pulse: bytes) -> "list[Item]":
    """All that is there: a slow client gets several at once. The pulse, where nothing is."""
    try:
        async with asyncio.timeout(_PULSE_S if pulse else None):
            items = [await queue.get()]
    except TimeoutError:
        return [pulse]
    while not queue.empty():
        items.append(queue.get_nowait())
    return items
