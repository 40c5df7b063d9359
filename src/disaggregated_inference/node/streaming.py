"""A generation on its way to a client: as one JSON document, or as server-sent events while it runs."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from disaggregated_inference.api import (
    DoneEvent,
    GeneratedChoice,
    GenerateResponse,
    Progress,
    PromptLogprob,
    PromptLogprobs,
    StreamEvent,
    TokenEvent,
    TokenLogprob,
)
from disaggregated_inference.http import error_body, json_response, sse_event, unless_disconnected
from disaggregated_inference.node.generation import Generation, Item

log = logging.getLogger(__name__)


async def respond(
    request: Request, generation: Generation, stream: bool, stalled_s: Callable[[], float], heartbeat_s: float
) -> Response:
    """Once the memory is reserved: an error before that has its own status, streamed or not. A stream's heartbeat
    carries `stalled_s`, so that its reader can tell a slow engine from a stuck one."""
    items = _Items(generation, heartbeat_s)
    first = await unless_disconnected(request, items.get(), generation.cancel)
    if isinstance(first, BaseException):
        raise first
    if stream:
        return StreamingResponse(_events(items, stalled_s), media_type="text/event-stream")
    events = await unless_disconnected(request, items.rest(), generation.cancel)
    return json_response(_document(generation, events, items.prompt_logprobs))


class _Items:
    """From the scheduler's thread to the event loop, without a waiting thread."""

    def __init__(self, generation: Generation, heartbeat_s: float) -> None:
        self.generation, self._heartbeat_s = generation, heartbeat_s
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Item] = asyncio.Queue()
        self.prompt_logprobs: list[PromptLogprob] = []
        generation.listen(self._deliver)

    def _deliver(self, item: Item) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    async def get(self) -> Item:
        return await self._queue.get()

    async def batch(self) -> list[Item]:
        """All that are there: a slow client gets several at once. Empty if none came within a heartbeat."""
        try:
            async with asyncio.timeout(self._heartbeat_s):
                items = [await self.get()]
        except TimeoutError:
            return []
        while not self._queue.empty():
            items.append(self._queue.get_nowait())
        return items

    async def rest(self) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        while (item := await self.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            if isinstance(item, TokenEvent):
                events.append(item)
            elif isinstance(item, PromptLogprobs):
                self.prompt_logprobs += item.tokens
        return events


async def _events(items: _Items, stalled_s: Callable[[], float]) -> AsyncIterator[bytes]:
    """One event per token; the last one has the metrics, or the error. A comment while there is nothing to send."""
    generation = items.generation
    try:
        while True:
            if not (batch := await items.batch()):
                yield b": alive %.1f\n\n" % stalled_s()
                continue
            if events := [_event(item) for item in batch if isinstance(item, TokenEvent | Progress | PromptLogprobs)]:
                yield b"".join(events)
            if isinstance(batch[-1], BaseException):
                raise batch[-1]
            if batch[-1] is None:
                break
        yield sse_event(_done(generation))
    except Exception as error:
        detail = error_body(error).error
        log.warning("a generation failed: %s", error, extra={"request_id": generation.request_id, "code": detail.code})
        yield sse_event(StreamEvent(error=detail))
    finally:
        generation.cancel()


def _event(item: TokenEvent | Progress | PromptLogprobs) -> bytes:
    if isinstance(item, PromptLogprobs):
        return sse_event(StreamEvent(prompt_logprobs=item))
    return sse_event(StreamEvent(progress=item) if isinstance(item, Progress) else item)


def _document(
    generation: Generation, events: list[TokenEvent], prompt_logprobs: list[PromptLogprob]
) -> GenerateResponse:
    numbers = range(generation.params.n)
    choices = tuple(_choice(number, [e for e in events if e.choice == number]) for number in numbers)
    first, done = choices[0], _done(generation)
    return GenerateResponse(
        generated_text=first.text,
        tokens=first.tokens or (),
        finish_reason=first.finish_reason,
        logprobs=first.logprobs,
        prompt_logprobs=tuple(prompt_logprobs),
        choices=choices if len(choices) > 1 else (),
        usage=done.usage,
        metrics=generation.metrics,
    )


def _choice(number: int, events: list[TokenEvent]) -> GeneratedChoice:
    return GeneratedChoice(
        index=number,
        text="".join(event.text for event in events),
        tokens=tuple(event.token for event in events),
        finish_reason=events[-1].finish_reason,
        logprobs=tuple(
            TokenLogprob(token=event.token, logprob=event.logprob, top_logprobs=event.top_logprobs)
            for event in events
            if event.logprob is not None
        ),
    )


def _done(generation: Generation) -> DoneEvent:
    metrics = generation.metrics
    log.info("generation done", extra={"request_id": generation.request_id} | msgspec.to_builtins(metrics))
    return DoneEvent(done=True, usage=metrics.usage, node_metrics=metrics)
