"""POST /v1/completions: one plain prompt or several."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from disaggregated_inference.api import RequestOptions, RequestRecord
from disaggregated_inference.gateway.chat import consume, encode_all
from disaggregated_inference.gateway.openai.output import (
    ChoiceLogprobs,
    CompletionWriter,
    completion_logprobs,
    stream_events,
)
from disaggregated_inference.gateway.openai.requests import CompletionRequest, read
from disaggregated_inference.gateway.request_context import RequestContext
from disaggregated_inference.http import json_response, read_json, sse_comment, unless_disconnected
from disaggregated_inference.models import ModelTokenizer
from disaggregated_inference.orchestrator import Delta

_USUAL_TOKENS = 16  # of a completion, as OpenAI has it, where neither the request nor the cluster file says
_MAX_CONCURRENT = 16  # prompts of one request: other requests get slots too

Generations = list[RequestOptions]
Deltas = AsyncGenerator[list[Delta], None]
PromptDelta = tuple[int, Delta]  # with the prompt's number


async def completions(request: Request) -> Response:
    context, completion = RequestContext(request), read(await read_json(request), CompletionRequest)
    generations = _generations(context, completion)
    writer = CompletionWriter(context, completion, "cmpl", "text_completion")
    tokenizer = await context.core.tokenizer(generations[0]["model"]) if completion.needs_tokenizer else None
    choices = _CompletionChoices(writer, completion, _echoes(completion, generations, tokenizer), tokenizer)
    batches = _merged(context, generations)
    if completion.stream:
        return await stream_events(context, encode_all(batches, choices.event, choices.end))
    await unless_disconnected(request, consume(batches, choices.take))
    return json_response(choices.body(), headers=context.headers())


def _generations(context: RequestContext, completion: CompletionRequest) -> Generations:
    """Options of the orchestrator, one set per prompt; each has an id of its own."""
    model = context.model(completion.model)
    shared: RequestOptions = completion.options() | context.options(completion.cache_salt) | {"model": model}
    if "max_tokens" not in context.core.config.options_of(model).defaults:
        shared["max_tokens"] = shared["max_tokens"] or max(_USUAL_TOKENS, completion.min_tokens or 0)
    prompts = completion.prompts()
    if len(prompts) == 1:
        return [shared | prompts[0]]
    return [shared | prompt | {"request_id": f"{context.id}-{number}"} for number, prompt in enumerate(prompts)]


def _echoes(
    completion: CompletionRequest, generations: Generations, tokenizer: ModelTokenizer | None
) -> list[str | None]:
    """What the text of each prompt's choices begins with."""
    if not completion.echo:
        return [None] * len(generations)
    return [_prompt_text(options, tokenizer) for options in generations]


def _prompt_text(options: RequestOptions, tokenizer: ModelTokenizer | None) -> str:
    tokens = options.get("tokens")
    if tokens is None:
        return options.get("prompt") or ""
    assert tokenizer
    return tokenizer.decode(tokens, special=True)


class CompletionChoice:
    """Collects the text of one choice: in a stream since the last event, otherwise all of it. `echo`: the prompt, if
    the text begins with it. `prompt_only`: the completion is left out."""

    def __init__(
        self, index: int, tokenizer: ModelTokenizer | None, echo: str | None = None, prompt_only: bool = False
    ) -> None:
        self._index, self._prompt_only = index, prompt_only
        self._logprobs = ChoiceLogprobs(tokenizer, completion_logprobs, echo)
        self._text: list[str] = [echo] if echo else []
        self._finish_reason: str | None = None
        self._has_prompt_logprobs = False

    def take(self, delta: Delta) -> None:
        if delta.prompt_logprobs:
            self._has_prompt_logprobs = True
            return self._logprobs.add_prompt(delta.prompt_logprobs)
        self._finish_reason = delta.finish_reason
        if self._prompt_only:
            self._finish_reason = "length" if delta.finish_reason else None
            return
        if delta.text:
            self._text.append(delta.text)
        self._logprobs.add(delta)

    @property
    def has_news(self) -> bool:
        return bool(self._text or self._finish_reason or self._has_prompt_logprobs)

    def chunk(self) -> dict[str, Any]:
        text, self._text, logprobs = "".join(self._text), [], self._logprobs.take()
        self._has_prompt_logprobs = False
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": self._finish_reason}


class _CompletionChoices:
    """The choices of all prompts; those of the first prompt come first."""

    def __init__(
        self,
        writer: CompletionWriter,
        completion: CompletionRequest,
        echoes: list[str | None],
        tokenizer: ModelTokenizer | None,
    ) -> None:
        self._writer, self._per_prompt, self._prompt_only = writer, completion.n or 1, completion.max_tokens == 0
        shown = tokenizer if completion.logprobs is not None else None
        each = [echo for echo in echoes for _ in range(self._per_prompt)]
        self._choices = [CompletionChoice(index, shown, echo, self._prompt_only) for index, echo in enumerate(each)]
        self._records: dict[int, RequestRecord] = {}

    def take(self, item: PromptDelta) -> list[CompletionChoice]:
        """The choices that it belongs to: prompt logprobs belong to all of their prompt."""
        prompt, delta = item
        if delta.completion:
            self._records[prompt] = self._reported(delta.completion.record)
        if delta.completion or delta.progress or delta.waiting:
            return []
        first = prompt * self._per_prompt
        numbers = range(self._per_prompt) if delta.prompt_logprobs else (delta.choice,)
        found = [self._choices[first + number] for number in numbers]
        for choice in found:
            choice.take(delta)
        return found

    def _reported(self, record: RequestRecord) -> RequestRecord:
        """The token that came with the prompt's logits is no part of a prompt alone."""
        if not self._prompt_only:
            return record
        return msgspec.structs.replace(record, completion_tokens=0, total_tokens=record.prompt_tokens)

    def event(self, item: PromptDelta) -> bytes:
        """Empty if there is nothing to send."""
        prompt, delta = item
        if events := [self._writer.event(choice.chunk()) for choice in self.take(item) if choice.has_news]:
            return b"".join(events)
        if not delta.progress:
            return sse_comment(delta.waiting) if delta.waiting else b""
        empty = {"index": prompt * self._per_prompt, "text": "", "logprobs": None, "finish_reason": None}
        return self._writer.progress(empty, delta.progress)

    def body(self) -> dict[str, Any]:
        return self._writer.body([choice.chunk() for choice in self._choices], self._sorted_records())

    def end(self) -> bytes:
        return self._writer.end(self._sorted_records())

    def _sorted_records(self) -> list[RequestRecord]:
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
