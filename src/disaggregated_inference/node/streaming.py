"""An answer on its way to a client: as one JSON document, or as server-sent events while it is being written."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from disaggregated_inference.errors import Cancelled, DisaggError
from disaggregated_inference.http.middleware import describe
from disaggregated_inference.node.generation import Generation, Item, Progress, TokenOutput

log = logging.getLogger(__name__)

Result = TypeVar("Result")

PULSE_S = 0.25  # how often a stream with nothing to say says that it is there


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def error_response(error: DisaggError, retry_after_s: Callable[[DisaggError], int]) -> Response:
    headers = {}
    if error.status == 503:
        headers["Retry-After"] = str(retry_after_s(error))
    if error.status == 408:  # the rest may come yet, and would be taken for the next request
        headers["Connection"] = "close"
    return json_response(describe(error), error.status, headers)


async def respond(request: Request, answer: Generation, stream: bool, stalled_s: Callable[[], float]) -> Response:
    """Once there is memory for it. What fails before that has its own status, streamed or not. `stalled_s` is told in
    a stream's pulse: who reads it knows a slow engine from one that is stuck."""
    items = _Items(answer)
    first = await unless_gone(request, items.get(), answer.cancel)
    if isinstance(first, BaseException):
        raise first
    if stream:
        return StreamingResponse(_events(items, stalled_s), media_type="text/event-stream")
    pieces = await unless_gone(request, items.rest(), answer.cancel)
    return json_response(_document(answer, pieces))


async def unless_gone(request: Request, result: Awaitable[Result], cancel: Callable[[], object]) -> Result:
    """Wait for a result; a client that leaves meanwhile cancels it."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    waiting, leaving = asyncio.ensure_future(result), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({waiting, leaving}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        cancel()
        raise
    finally:
        leaving.cancel()
    if not waiting.done():
        await asyncio.to_thread(cancel)
        await asyncio.wait({waiting})
        waiting.exception()
        raise Cancelled("the client is gone")
    return waiting.result()


class _Items:
    """As they come from the engine's thread; no thread waits for them here."""

    def __init__(self, answer: Generation) -> None:
        self.answer = answer
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Item] = asyncio.Queue()
        answer.listen(self._deliver)

    def _deliver(self, item: Item) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    async def get(self) -> Item:
        return await self._queue.get()

    async def some(self) -> list[Item]:
        """All that are there: a slow client gets several at once. None where nothing came for a moment."""
        try:
            items = [self._queue.get_nowait() if self._queue.qsize() else await asyncio.wait_for(self.get(), PULSE_S)]
        except TimeoutError:
            return []
        while not self._queue.empty():
            items.append(self._queue.get_nowait())
        return items

    async def rest(self) -> list[TokenOutput]:
        pieces: list[TokenOutput] = []
        while (item := await self._queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            if isinstance(item, TokenOutput):
                pieces.append(item)
        return pieces


async def _events(items: _Items, stalled_s: Callable[[], float]) -> AsyncIterator[bytes]:
    """One event per token; the last one carries the metrics, or the error. A comment where there is nothing to say."""
    answer = items.answer
    try:
        while True:
            if not (batch := await items.some()):
                yield b": alive %.1f\n\n" % stalled_s()
                continue
            if answer.rules.progress and (told := [item for item in batch if isinstance(item, Progress)]):
                yield b"".join(_event({"progress": item}) for item in told)  # none of it comes after the first token
            pieces = [item for item in batch if isinstance(item, TokenOutput)]
            if pieces:
                yield b"".join(_event(_token(answer, piece)) for piece in pieces)
            if isinstance(batch[-1], BaseException):
                raise batch[-1]
            if batch[-1] is None:
                break
        yield _event({"done": True} | _summary(answer))
    except Exception as error:
        code = describe(error)["error"]["code"]
        log.warning("an answer failed: %s", error, extra={"request_id": answer.request_id, "code": code})
        yield _event(describe(error))
    finally:
        answer.cancel()


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def _token(answer: Generation, piece: TokenOutput) -> dict[str, Any]:
    event: dict[str, Any] = {"token": piece.token, "text": piece.text}
    if answer.rules.n > 1:
        event["index"] = piece.choice
    if piece.logprob is not None:
        event |= _likelihood(piece)
    if piece.finish_reason:
        event["finish_reason"] = piece.finish_reason
    return event


def _likelihood(piece: TokenOutput) -> dict[str, Any]:
    return {"logprob": piece.logprob, "top_logprobs": [{"token": token, "logprob": p} for token, p in piece.top]}


def _document(answer: Generation, pieces: list[TokenOutput]) -> dict[str, Any]:
    choices = [_choice(number, [p for p in pieces if p.choice == number]) for number in range(answer.rules.n)]
    first = choices[0]
    document = {"generated_text": first["text"], "tokens": first["tokens"], "finish_reason": first["finish_reason"]}
    if "logprobs" in first:
        document["logprobs"] = first["logprobs"]
    if len(choices) > 1:
        document["choices"] = choices
    return document | _summary(answer)


def _choice(number: int, pieces: list[TokenOutput]) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": number,
        "text": "".join(piece.text for piece in pieces),
        "tokens": [piece.token for piece in pieces],
        "finish_reason": pieces[-1].finish_reason,
    }
    if pieces[-1].logprob is not None:
        choice["logprobs"] = [{"token": piece.token} | _likelihood(piece) for piece in pieces]
    return choice


def _summary(answer: Generation) -> dict[str, Any]:
    metrics = answer.metrics
    log.info("answer done", extra={"request_id": answer.request_id} | msgspec.to_builtins(metrics))
    usage = {
        "prompt_tokens": metrics.prompt_tokens,
        "completion_tokens": metrics.completion_tokens,
        "total_tokens": metrics.prompt_tokens + metrics.completion_tokens,
        "cached_tokens": metrics.spared_tokens,
    }
    return {"usage": usage, "metrics": msgspec.to_builtins(metrics)}
