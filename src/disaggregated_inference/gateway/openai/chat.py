"""POST /v1/chat/completions."""

from collections.abc import Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from disaggregated_inference.api import RequestRecord
from disaggregated_inference.gateway.chat import ChatDelta, ChatRequest, consume, encode_all, stream_chat
from disaggregated_inference.gateway.openai.messages import plain_messages
from disaggregated_inference.gateway.openai.output import (
    ChoiceLogprobs,
    CompletionWriter,
    chat_logprobs,
    encode,
    stream_events,
)
from disaggregated_inference.gateway.openai.requests import ChatCompletionRequest, read
from disaggregated_inference.gateway.request_context import RequestContext
from disaggregated_inference.gateway.tool_parsers.base import (
    ContentDelta,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from disaggregated_inference.http import json_response, read_json, sse_comment, unless_disconnected
from disaggregated_inference.models import ModelTokenizer


async def chat_completions(request: Request) -> Response:
    context, completion = RequestContext(request), read(await read_json(request), ChatCompletionRequest)
    chat = chat_request(context, completion)
    tokenizer = await context.core.tokenizer(chat.model) if completion.logprobs else None
    choices = _ChatChoices(completion, tokenizer, CompletionWriter(context, completion, "chatcmpl", "chat.completion"))
    batches = stream_chat(context.core, chat, context.on_plan)
    if completion.stream:
        return await stream_events(context, encode_all(batches, choices.event, choices.end))
    await unless_disconnected(request, consume(batches, choices.take))
    return json_response(choices.body(), headers=context.headers())


def chat_request(context: RequestContext, completion: ChatCompletionRequest) -> ChatRequest:
    return ChatRequest(
        model=context.model(completion.model),
        messages=plain_messages(completion.messages),
        tools=[tool.plain() for tool in completion.tools or []],
        tool_choice=completion.choice(),
        template=completion.template(),
        format=completion.format(),
        options=completion.options() | context.options(completion.cache_salt),
    )


class ChatChoice:
    """Collects the content of one choice: in a stream since the last event, otherwise all of it."""

    def __init__(
        self,
        index: int,
        request: ChatCompletionRequest,
        tokenizer: ModelTokenizer | None,
        text_frame: tuple[bytes, bytes] = (b"", b""),
    ) -> None:
        self.index, self._logprobs = index, ChoiceLogprobs(tokenizer, chat_logprobs)
        self._before, self._after = text_frame
        self._single_call = request.parallel_tool_calls is False
        self._role: dict[str, Any] = {"role": "assistant", "content": None if request.tools else ""}
        self._text_only = False  # once the role was sent, and without logprobs
        self._content: list[ContentDelta] = []
        self._finish_reason: str | None = None
        self._thinking = False
        self.reasoning_tokens = 0

    def take(self, delta: ChatDelta) -> None:
        for piece in delta.content:
            self._thinking = isinstance(piece, ReasoningDelta)
            if not (self._single_call and isinstance(piece, ToolCallStart | ToolCallArguments) and piece.index):
                self._content.append(piece)
        self.reasoning_tokens += self._thinking
        self._finish_reason = delta.finish_reason
        self._logprobs.add(delta)

    def event(self, delta: ChatDelta, writer: CompletionWriter) -> bytes:
        """The delta as an event; empty if there is nothing to send. Nearly all deltas take the first way."""
        content = delta.content
        if self._text_only and len(content) == 1 and type(content[0]) is TextDelta and not delta.finish_reason:
            self._thinking = False
            return self._before + encode(content[0].text) + self._after
        self.take(delta)
        chunk = self.chunk()
        return writer.event(chunk) if chunk else b""

    def empty_chunk(self) -> dict[str, Any]:
        """The first chunk has the role. llama.cpp sends it every time, but OpenAI's client joins the values."""
        return {"index": self.index, "delta": self._take_role(), "logprobs": None, "finish_reason": None}

    def chunk(self) -> dict[str, Any] | None:
        """The content since the last chunk, if there is any."""
        if not self._content and not self._finish_reason and not self._role:
            return None
        delta = self._take_role() | content_fields(self._content)
        self._content, logprobs = [], self._logprobs.take()
        return {"index": self.index, "delta": delta, "logprobs": logprobs, "finish_reason": self._finish_reason}

    def _take_role(self) -> dict[str, Any]:
        role, self._role = self._role, {}
        self._text_only = not self._logprobs.wanted
        return role

    def body(self) -> dict[str, Any]:
        """The whole message."""
        content = content_fields(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None} | content
        if "tool_calls" not in message:
            message["content"] = message["content"] or ""
        for call in message.get("tool_calls", ()):
            del call["index"]
        logprobs = self._logprobs.take()
        return {"index": self.index, "message": message, "logprobs": logprobs, "finish_reason": self._finish_reason}


def content_fields(content: list[ContentDelta]) -> dict[str, Any]:
    """The fields of one delta or message. Clients join deltas by key, and tool calls by index."""
    if len(content) == 1 and isinstance(content[0], TextDelta):
        return {"content": content[0].text}
    fields: dict[str, Any] = {}
    if text := "".join(piece.text for piece in content if isinstance(piece, TextDelta)):
        fields["content"] = text
    if reasoning := "".join(piece.text for piece in content if isinstance(piece, ReasoningDelta)):
        fields |= {"reasoning_content": reasoning, "reasoning": reasoning}  # clients know one name or the other
    calls = _tool_calls(piece for piece in content if isinstance(piece, ToolCallStart | ToolCallArguments))
    return fields | ({"tool_calls": calls} if calls else {})


def _tool_calls(content: Iterable[ToolCallStart | ToolCallArguments]) -> list[dict[str, Any]]:
    heads: dict[int, dict[str, Any]] = {}
    arguments: dict[int, list[str]] = {}
    for piece in content:
        pieces = arguments.setdefault(piece.index, [])
        if isinstance(piece, ToolCallStart):
            heads[piece.index] = {"id": piece.id, "type": "function", "function": {"name": piece.name}}
        else:
            pieces.append(piece.text)
    return [_tool_call(index, heads.get(index, {}), "".join(pieces)) for index, pieces in arguments.items()]


def _tool_call(index: int, head: dict[str, Any], arguments: str) -> dict[str, Any]:
    return {"index": index} | head | {"function": head.get("function", {}) | {"arguments": arguments}}


class _ChatChoices:
    def __init__(
        self, request: ChatCompletionRequest, tokenizer: ModelTokenizer | None, writer: CompletionWriter
    ) -> None:
        self._writer = writer
        self._choices = [
            ChatChoice(index, request, tokenizer, writer.text_frame(index)) for index in range(request.n or 1)
        ]
        self._records: list[RequestRecord] = []

    def take(self, delta: ChatDelta) -> None:
        if delta.record:
            self._records.append(delta.record)
        elif delta.progress is None and not delta.waiting:
            self._choices[delta.choice].take(delta)

    def event(self, delta: ChatDelta) -> bytes:
        if delta.progress is not None:
            return self._writer.progress(self._choices[0].empty_chunk(), delta.progress)
        if delta.record:
            self._records.append(delta.record)
            return b""
        if delta.waiting:
            return sse_comment(delta.waiting)
        return self._choices[delta.choice].event(delta, self._writer)

    def body(self) -> dict[str, Any]:
        return self._writer.body([choice.body() for choice in self._choices], self._records, self._reasoning_tokens)

    def end(self) -> bytes:
        return self._writer.end(self._records, self._reasoning_tokens)

    @property
    def _reasoning_tokens(self) -> int:
        return sum(choice.reasoning_tokens for choice in self._choices)
