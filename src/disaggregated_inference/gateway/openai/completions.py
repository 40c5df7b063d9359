"""POST /v1/completions: plain prompts, one or several."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from disaggregated_inference.gateway.openai.errors import error_body
from disaggregated_inference.gateway.openai.output import CompletionWriter, TokenLogprob, failure, in_completion, likely
from disaggregated_inference.gateway.openai.requests import CompletionRequest, read
from disaggregated_inference.gateway.request_context import RequestContext
from disaggregated_inference.http.sse import body_of, json_response, streamed, unless_gone
from disaggregated_inference.models.tokenizer import ModelTokenizer
from disaggregated_inference.orchestrator import Delta

_AT_ONCE = 16  # prompts of one request: who sends many leaves places for others

Asks = list[dict[str, Any]]
Deltas = AsyncGenerator[list[Delta], None]


async def completions(request: Request) -> Response:
    call, asked = RequestContext(request), read(await body_of(request), CompletionRequest)
    asks = _asks(call, asked)
    if asked.stream:
        return await streamed(request, _events(call, asked, asks), failure(error_body), call.headers)
    return json_response(await unless_gone(request, _whole(call, asked, asks)), headers=call.headers())


def _asks(call: RequestContext, asked: CompletionRequest) -> Asks:
    """For the orchestrator, one per prompt; each has an id of its own."""
    shared = asked.options() | call.options() | {"model": call.model(asked.model)}
    prompts = asked.prompts()
    if len(prompts) == 1:
        return [shared | prompts[0]]
    return [shared | prompt | {"request_id": f"{call.id}-{number}"} for number, prompt in enumerate(prompts)]


class CompletionChoice:
    """What one choice has said and nobody was told yet."""

    def __init__(self, index: int, tokenizer: ModelTokenizer | None) -> None:
        self._index, self._tokenizer = index, tokenizer
        self._text: list[str] = []
        self._likely: list[TokenLogprob] = []
        self._finish: str | None = None
        self._offset = 0

    def take(self, delta: Delta) -> None:
        if delta.text:
            self._text.append(delta.text)
        self._finish = delta.finish_reason
        if self._tokenizer and delta.token is not None and delta.logprob is not None:
            found = likely(self._tokenizer, delta.token, delta.logprob, delta.top_logprobs)
            self._likely += [found] if found else []

    @property
    def has_news(self) -> bool:
        return bool(self._text or self._finish)

    def told(self) -> dict[str, Any]:
        logprobs = in_completion(self._likely, self._offset) if self._tokenizer else None
        text = "".join(self._text)
        self._offset += sum(len(item.text) for item in self._likely)
        self._text, self._likely = [], []
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": self._finish}


class _CompletionChoices:
    """Of all prompts: the first one's come first."""

    def __init__(self, prompts: int, each: int, tokenizer: ModelTokenizer | None) -> None:
        self._each = each
        self._all = [CompletionChoice(index, tokenizer) for index in range(prompts * each)]
        self._records: dict[int, dict[str, Any]] = {}

    def take(self, prompt: int, delta: Delta) -> CompletionChoice | None:
        if delta.metrics is not None or delta.progress:
            if delta.metrics is not None:
                self._records[prompt] = delta.metrics
            return None
        choice = self._all[prompt * self._each + delta.choice]
        choice.take(delta)
        return choice

    def silent(self, prompt: int) -> dict[str, Any]:
        return {"index": prompt * self._each, "text": "", "logprobs": None, "finish_reason": None}

    @property
    def records(self) -> list[dict[str, Any]]:
        return [self._records[prompt] for prompt in sorted(self._records)]

    def whole(self) -> list[dict[str, Any]]:
        return [choice.told() for choice in self._all]


async def _begun(call: RequestContext, asked: CompletionRequest, asks: Asks) -> _CompletionChoices:
    tokenizer = await call.core.tokenizer(asks[0]["model"]) if asked.logprobs is not None else None
    return _CompletionChoices(len(asks), asked.n or 1, tokenizer)


async def _whole(call: RequestContext, asked: CompletionRequest, asks: Asks) -> dict[str, Any]:
    told, choices = CompletionWriter(call, asked, "cmpl", "text_completion"), await _begun(call, asked, asks)
    async with aclosing(_together([call.core.batches(**ask) for ask in asks])) as batches:
        async for prompt, deltas in batches:
            for delta in deltas:
                choices.take(prompt, delta)
    return told.whole(choices.whole(), choices.records)


async def _events(call: RequestContext, asked: CompletionRequest, asks: Asks) -> AsyncGenerator[bytes, None]:
    told, choices = CompletionWriter(call, asked, "cmpl", "text_completion"), await _begun(call, asked, asks)
    async with aclosing(_together([call.core.batches(**ask) for ask in asks])) as batches:
        async for prompt, deltas in batches:
            if lines := b"".join([_line(told, choices, prompt, delta) for delta in deltas]):
                yield lines
    yield told.end(choices.records)


def _line(told: CompletionWriter, choices: _CompletionChoices, prompt: int, delta: Delta) -> bytes:
    """An event, or nothing."""
    if (choice := choices.take(prompt, delta)) and choice.has_news:
        return told.event(choice.told())
    return told.progress(choices.silent(prompt), delta.progress) if delta.progress else b""


async def _together(streams: Sequence[Deltas]) -> AsyncGenerator[tuple[int, list[Delta]], None]:
    """Several answers as they are written, their pieces with the answer's number. One that fails ends all."""
    news: asyncio.Queue[tuple[int, list[Delta]] | Exception | None] = asyncio.Queue()
    places = asyncio.Semaphore(_AT_ONCE)

    async def follow(number: int, stream: Deltas) -> None:
        try:
            async with places, aclosing(stream):
                async for deltas in stream:
                    news.put_nowait((number, deltas))
            news.put_nowait(None)
        except Exception as error:
            news.put_nowait(error)

    following = [asyncio.create_task(follow(number, stream)) for number, stream in enumerate(streams)]
    left = len(following)
    try:
        while left:
            item = await news.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
