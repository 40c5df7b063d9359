"""POST /v1/chat/completions."""

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from disaggregated_inference.gateway.chat import ChatDelta, ChatRequest, converse
from disaggregated_inference.gateway.openai.errors import error_body
from disaggregated_inference.gateway.openai.messages import plain_messages
from disaggregated_inference.gateway.openai.output import CompletionWriter, TokenLogprob, failure, in_chat, likely
from disaggregated_inference.gateway.openai.requests import ChatCompletionRequest, read
from disaggregated_inference.gateway.request_context import RequestContext
from disaggregated_inference.gateway.tool_parsers.base import (
    ContentDelta,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from disaggregated_inference.http.sse import body_of, json_response, streamed, unless_gone
from disaggregated_inference.models.tokenizer import ModelTokenizer


async def chat_completions(request: Request) -> Response:
    call, asked = RequestContext(request), read(await body_of(request), ChatCompletionRequest)
    turn = turn_of(call, asked)
    if asked.stream:
        return await streamed(request, _events(call, asked, turn), failure(error_body), call.headers)
    return json_response(await unless_gone(request, _whole(call, asked, turn)), headers=call.headers())


def turn_of(call: RequestContext, asked: ChatCompletionRequest) -> ChatRequest:
    return ChatRequest(
        model=call.model(asked.model),
        messages=plain_messages(asked.messages),
        tools=[tool.plain() for tool in asked.tools or []],
        tool_choice=asked.choice(),
        template=asked.template(),
        options=asked.options() | call.options(),
    )


class ChatChoice:
    """What one choice has said and nobody was told yet: in a stream since the last event, else all of it."""

    def __init__(self, index: int, asked: ChatCompletionRequest, tokenizer: ModelTokenizer | None) -> None:
        self.index, self._tokenizer = index, tokenizer
        self._one_call = asked.parallel_tool_calls is False
        self._opening: dict[str, Any] = {"role": "assistant", "content": None if asked.tools else ""}
        self._said: list[ContentDelta] = []
        self._likely: list[TokenLogprob] = []
        self._finish: str | None = None
        self._thinking = False
        self.thought_tokens = 0

    def take(self, part: ChatDelta) -> None:
        for said in part.said:
            self._thinking = isinstance(said, ReasoningDelta)
            if not (self._one_call and isinstance(said, ToolCallStart | ToolCallArguments) and said.index):
                self._said.append(said)
        self.thought_tokens += self._thinking
        self._finish = part.finish_reason
        if self._tokenizer and part.token is not None and part.logprob is not None:
            found = likely(self._tokenizer, part.token, part.logprob, part.top_logprobs)
            self._likely += [found] if found else []

    def line(self, part: ChatDelta, told: CompletionWriter) -> bytes:
        """The part as an event, or nothing, if there is nothing to tell."""
        plain = not (self._opening or self._tokenizer or part.finish_reason)
        if plain and len(part.said) == 1 and isinstance(part.said[0], TextDelta):
            self._thinking = False
            return told.text(self.index, part.said[0].text)
        self.take(part)
        news = self.told()
        return told.event(news) if news else b""

    def silent(self) -> dict[str, Any]:
        """As an event that says nothing but, the first time, whose turn it is. llama.cpp says so every time; OpenAI's
        own client would put the words together: assistantassistant."""
        delta, self._opening = self._opening, {}
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def told(self) -> dict[str, Any] | None:
        """As an event, if there is anything to tell; the first one says whose turn it is."""
        if not self._said and not self._finish and not self._opening:
            return None
        delta = delta_of(self._said)
        if self._opening:
            delta, self._opening = self._opening | delta, {}
        logprobs = in_chat(self._likely) if self._tokenizer else None
        self._said, self._likely = [], []
        return {"index": self.index, "delta": delta, "logprobs": logprobs, "finish_reason": self._finish}

    def whole(self) -> dict[str, Any]:
        """A message is the delta of everything."""
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None} | delta_of(self._said)
        if "tool_calls" not in message:
            message["content"] = message["content"] or ""
        for call in message.get("tool_calls", ()):
            del call["index"]
        logprobs = in_chat(self._likely) if self._tokenizer else None
        return {"index": self.index, "message": message, "logprobs": logprobs, "finish_reason": self._finish}


def delta_of(said: list[ContentDelta]) -> dict[str, Any]:
    """All of it in one: clients put deltas together by key, and tool calls by index."""
    if len(said) == 1 and isinstance(said[0], TextDelta):
        return {"content": said[0].text}  # nearly always
    delta: dict[str, Any] = {}
    if text := "".join(piece.text for piece in said if isinstance(piece, TextDelta)):
        delta["content"] = text
    if thought := "".join(piece.text for piece in said if isinstance(piece, ReasoningDelta)):
        delta |= {"reasoning_content": thought, "reasoning": thought}  # there is no one name for it
    calls = _calls(piece for piece in said if isinstance(piece, ToolCallStart | ToolCallArguments))
    return delta | ({"tool_calls": calls} if calls else {})


def _calls(said: Iterable[ToolCallStart | ToolCallArguments]) -> list[dict[str, Any]]:
    heads: dict[int, dict[str, Any]] = {}
    arguments: dict[int, list[str]] = {}
    for piece in said:
        pieces = arguments.setdefault(piece.index, [])
        if isinstance(piece, ToolCallStart):
            heads[piece.index] = {"id": piece.id, "type": "function", "function": {"name": piece.name}}
        else:
            pieces.append(piece.text)
    return [_call(index, heads.get(index, {}), "".join(pieces)) for index, pieces in arguments.items()]


def _call(index: int, head: dict[str, Any], arguments: str) -> dict[str, Any]:
    return {"index": index} | head | {"function": head.get("function", {}) | {"arguments": arguments}}


class _ChatChoices:
    def __init__(self, asked: ChatCompletionRequest, tokenizer: ModelTokenizer | None) -> None:
        self._all = [ChatChoice(index, asked, tokenizer) for index in range(asked.n or 1)]
        self.records: list[dict[str, Any]] = []

    def of(self, part: ChatDelta) -> ChatChoice | None:
        """Whose part it is, if it is of the answer."""
        if part.token is None and (part.metrics is not None or part.progress):
            self.records += [part.metrics] if part.metrics is not None else []
            return None
        return self._all[part.choice]

    def line(self, part: ChatDelta, told: CompletionWriter) -> bytes:
        if choice := self.of(part):
            return choice.line(part, told)
        return told.progress(self._all[0].silent(), part.progress) if part.progress else b""

    def whole(self) -> list[dict[str, Any]]:
        return [choice.whole() for choice in self._all]

    @property
    def thought_tokens(self) -> int:
        return sum(choice.thought_tokens for choice in self._all)


async def _begun(call: RequestContext, asked: ChatCompletionRequest, turn: ChatRequest) -> _ChatChoices:
    return _ChatChoices(asked, await call.core.tokenizer(turn.model) if asked.logprobs else None)


async def _whole(call: RequestContext, asked: ChatCompletionRequest, turn: ChatRequest) -> dict[str, Any]:
    told, choices = CompletionWriter(call, asked, "chatcmpl", "chat.completion"), await _begun(call, asked, turn)
    async with aclosing(converse(call.core, turn)) as batches:
        async for parts in batches:
            for part in parts:
                if choice := choices.of(part):
                    choice.take(part)
    return told.whole(choices.whole(), choices.records, choices.thought_tokens)


async def _events(call: RequestContext, asked: ChatCompletionRequest, turn: ChatRequest) -> AsyncGenerator[bytes, None]:
    told, choices = CompletionWriter(call, asked, "chatcmpl", "chat.completion.chunk"), await _begun(call, asked, turn)
    async with aclosing(converse(call.core, turn)) as batches:
        async for parts in batches:
            if lines := b"".join([choices.line(part, told) for part in parts]):
                yield lines
    yield told.end(choices.records, choices.thought_tokens)
