"""POST /v1/completions: one plain prompt or several."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from disaggregated_inference.api import RequestOptions
from disaggregated_inference.gateway.chat import consume, encode_all
from disaggregated_inference.gateway.openai.output import (
    ChoiceLogprobs,
    CompletionWriter,
    completion_logprobs,
    stream_events,
)
from disaggregated_inference.gateway.openai.requests import CompletionRequest, read
from disaggregated_inference.gateway.request_context import RequestContext
from disaggregated_inference.http import json_response, read_json, unless_disconnected
from disaggregated_inference.models import ModelTokenizer
from disaggregated_inference.orchestrator import Delta

_MAX_CONCURRENT = 16  # prompts of one request: other requests get slots too

Generations = list[RequestOptions]
Deltas = AsyncGenerator[list[Delta], None]
PromptDelta = tuple[int, Delta]  # with the prompt's number


async def completions(request: Request) -> Response:
    context, completion = RequestContext(request), read(await read_json(request), CompletionRequest)
    generations = _generations(context, completion)
    writer = CompletionWriter(context, completion, "cmpl", "text_completion")
    tokenizer = await context.core.tokenizer(generations[0]["model"]) if completion.logprobs is not None else None
    choices = _CompletionChoices(writer, len(generations), completion.n or 1, tokenizer)
    batches = _merged(context, generations)
    if completion.stream:
        return await stream_events(context, encode_all(batches, choices.event, choices.end))
    await unless_disconnected(request, consume(batches, choices.take))
    return json_response(choices.body(), headers=context.headers())


def _generations(context: RequestContext, completion: CompletionRequest) -> Generations:
    """Options of the orchestrator, one set per prompt; each has an id of its own."""
    shared: RequestOptions = completion.options() | context.options() | {"model": context.model(completion.model)}
    prompts = completion.prompts()
    if len(prompts) == 1:
        return [shared | prompts[0]]
    return [shared | prompt | {"request_id": f"{context.id}-{number}"} for number, prompt in enumerate(prompts)]


class CompletionChoice:
    """Collects the text of one choice: in a stream since the last event, otherwise all of it."""

    def __init__(self, index: int, tokenizer: ModelTokenizer | None) -> None:
        self._index, self._logprobs = index, ChoiceLogprobs(tokenizer, completion_logprobs)
        self._text: list[str] = []
        self._finish_reason: str | None = None

    def take(self, delta: Delta) -> None:
        if delta.text:
            self._text.append(delta.text)
        self._finish_reason = delta.finish_reason
        self._logprobs.add(delta)

    @property
    def has_news(self) -> bool:
        return bool(self._text or self._finish_reason)

    def chunk(self) -> dict[str, Any]:
        text, self._text, logprobs = "".join(self._text), [], self._logprobs.take()
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": self._finish_reason}


class _CompletionChoices:
    """The choices of all prompts; those of the first prompt come first."""

    def __init__(
        self, writer: CompletionWriter, prompts: int, per_prompt: int, tokenizer: ModelTokenizer | None
    ) -> None:
        self._writer, self._per_prompt = writer, per_prompt
        self._choices = [CompletionChoice(index, tokenizer) for index in range(prompts * per_prompt)]
        self._records: dict[int, dict[str, Any]] = {}

    def take(self, item: PromptDelta) -> CompletionChoice | None:
        prompt, delta = item
        if delta.metrics is not None or delta.progress:
            if delta.metrics is not None:
                self._records[prompt] = delta.metrics
            return None
        choice = self._choices[prompt * self._per_prompt + delta.choice]
        choice.take(delta)
        return choice

    def event(self, item: PromptDelta) -> bytes:
        """Empty if there is nothing to send."""
        prompt, delta = item
        if (choice := self.take(item)) and choice.has_news:
            return self._writer.event(choice.chunk())
        if not delta.progress:
            return b""
        empty = {"index": prompt * self._per_prompt, "text": "", "logprobs": None, "finish_reason": None}
        return self._writer.progress(empty, delta.progress)

    def body(self) -> dict[str, Any]:
        return self._writer.body([choice.chunk() for choice in self._choices], self._sorted_records())

    def end(self) -> bytes:
        return self._writer.end(self._sorted_records())

    def _sorted_records(self) -> list[dict[str, Any]]:
        return [self._records[prompt] for prompt in sorted(self._records)]


async def _merged(context: RequestContext, generations: Generations) -> AsyncGenerator[list[PromptDelta], None]:
    """The deltas of several generations as they come, each with its prompt's number. An error in one ends all."""
    streams = [context.core.batches(options, context.on_plan) for options in generations]
    queue: asyncio.Queue[list[PromptDelta] | Exception | None] = asyncio.Queue()
    slots = asyncio.Semaphore(_MAX_CONCURRENT)

    async def follow(number: int, stream: Deltas) -> None:
        try:
            async with slots, aclosing(stream):
                async for deltas in stream:
                    queue.put_nowait([(number, delta) for delta in deltas])
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    following = [asyncio.create_task(follow(number, stream)) for number, stream in enumerate(streams)]
    running = len(following)
    try:
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
