"""Anthropic's Messages API: answers as blocks of text, thought and tool use."""

import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from disaggregated_inference.errors import BadRequest, ContextTooLong, DisaggError
from disaggregated_inference.gateway.anthropic import requests as shapes
from disaggregated_inference.gateway.chat import ChatDelta, Parts, asked, converse
from disaggregated_inference.gateway.reasoning_effort import can_think
from disaggregated_inference.gateway.request_context import RequestContext
from disaggregated_inference.gateway.tool_parsers.base import (
    ContentDelta,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from disaggregated_inference.http.sse import COMMENT, body_of, json_response, streamed, unless_gone
from disaggregated_inference.models.tokenizer import ModelTokenizer
from disaggregated_inference.orchestrator.threads import in_thread

log = logging.getLogger(__name__)

Event = dict[str, Any]

_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
REQUEST_ID = "request-id"  # where Anthropic's own clients look for it
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def routes() -> list[Route]:
    return [
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    ]


def error_body(error: Exception, request_id: str | None = None) -> dict[str, Any]:
    status = error.status if isinstance(error, DisaggError) else getattr(error, "status_code", 500)
    kind = _ERRORS.get(status, "invalid_request_error" if 400 <= status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": _message(error)}, "request_id": request_id}


def _message(error: Exception) -> str:
    """What was not foreseen may tell of what is nobody's business. Programs make room when they read these words."""
    if isinstance(error, ContextTooLong):
        needed = f"{error.how_exact}{error.needed_tokens} tokens with max_tokens"
        return f"prompt is too long: {needed} > {error.window_tokens} maximum"
    if isinstance(error, HTTPException):
        return error.detail
    return str(error) if isinstance(error, DisaggError) else "internal error"


async def messages(request: Request) -> Response:
    call, wanted = RequestContext(request), shapes.understood(await body_of(request), shapes.MessagesRequest)
    model = call.model(wanted.model)
    options = call.options() | {"progress": bool(wanted.stream)}  # a stream begins with how much was read
    turn, tokenizer = wanted.turn(model, **options), await call.core.tokenizer(model)
    if wanted.must_think and not can_think(tokenizer):
        raise BadRequest(f"thinking: {wanted.model} does not think; leave it out, or use another model")
    answer = AnthropicMessageBuilder(wanted, tokenizer)
    parts = converse(call.core, turn)
    if not wanted.stream:
        await unless_gone(request, _exhausted(answer, parts))
        return json_response(answer.message(), headers=_headers(call))

    def failed(error: Exception) -> bytes:
        if not isinstance(error, DisaggError):
            log.error("a message failed", exc_info=error)
        return _told([error_body(error, call.id)])

    return await streamed(request, _lines(answer, parts), failed, lambda: _headers(call), answer.pulse)


async def count_tokens(request: Request) -> Response:
    call, wanted = RequestContext(request), shapes.understood(await body_of(request), shapes.CountTokensRequest)
    model = call.model(wanted.model)
    tokenizer = await call.core.tokenizer(model)
    prompt = asked(wanted.turn(model), tokenizer)

    def counted() -> int:
        return len(tokenizer.encode(tokenizer.render_chat(prompt["messages"], **prompt["template"])))

    count = await unless_gone(request, in_thread(counted))
    return json_response({"input_tokens": count}, headers=_headers(call))


def _headers(call: RequestContext) -> dict[str, str]:
    return call.headers() | {REQUEST_ID: call.id}


async def _exhausted(answer: "AnthropicMessageBuilder", batches: Parts) -> None:
    async with aclosing(batches):
        async for parts in batches:
            for part in parts:
                answer.take(part)


async def _lines(answer: "AnthropicMessageBuilder", batches: Parts) -> AsyncGenerator[bytes, None]:
    async with aclosing(batches):
        async for parts in batches:
            if lines := b"".join([_told(answer.take(part)) for part in parts]):
                yield lines
                answer.is_begun = True  # the next one was asked for, so this one was sent


def _told(events: list[Event]) -> bytes:
    return b"".join(
        b"event: %s\ndata: %s\n\n" % (event["type"].encode(), msgspec.json.encode(event)) for event in events
    )


class AnthropicMessageBuilder:
    """A message while it is written. It begins with its first part: what fails before has a status of its own."""

    def __init__(self, wanted: shapes.MessagesRequest, tokenizer: ModelTokenizer) -> None:
        self._id, self._model, self._tokenizer = f"msg_{secrets.token_hex(12)}", wanted.model, tokenizer
        self._stops = wanted.stop_sequences or []
        self._thinks = wanted.thinking is None or wanted.thinking.type != "disabled"
        self._one_call = bool(wanted.tool_choice.disable_parallel_tool_use)
        self._tokens: list[int] = []
        self._content: list[shapes.Block] = []
        self._open: _OpenBlock | None = None
        self._began = self.is_begun = False  # here; at the client
        self._stopped: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}
        self._usage = _usage({})

    def message(self) -> dict[str, Any]:
        said = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        return said | {"content": self._content, **self._stopped, "usage": self._usage}

    def pulse(self) -> bytes:
        """A message's first event is its start: what comes before must be none."""
        return _PING if self.is_begun else COMMENT

    def take(self, part: ChatDelta) -> list[Event]:
        if part.progress:
            total = part.progress.total  # whoever reads computes the last token at least
            self._usage = _usage({"prompt_tokens": total, "cached_tokens": min(part.progress.cache, total - 1)})
            return []
        return [*self._opening(), *self._taken(part)]

    def _opening(self) -> Iterator[Event]:
        """What the prefill node held is known in the end: `message_delta` tells it again, and rightly."""
        if not self._began:
            self._began = True
            yield {"type": "message_start", "message": self.message() | {"content": []}}
            yield {"type": "ping"}

    def _taken(self, part: ChatDelta) -> Iterator[Event]:
        if self._stops and part.token is not None:
            self._tokens.append(part.token)
        for said in part.said:
            yield from self._say(said)
        if part.finish_reason:
            yield from self._close()
            self._stopped = self._why(part.finish_reason)
        if part.metrics is not None:
            self._usage = _usage(part.metrics)
            yield {"type": "message_delta", "delta": self._stopped, "usage": self._usage}
            yield {"type": "message_stop"}

    def _say(self, said: ContentDelta) -> Iterator[Event]:
        if self._unwanted(said):
            return
        if not (self._open and self._open.takes(said)):
            yield from self._close()
            self._open = _OPENS[type(said)](said)
            yield self._at("content_block_start", content_block=self._open.block())
        if not isinstance(said, ToolCallStart):
            yield self._at("content_block_delta", delta=self._open.more(said.text))

    def _unwanted(self, said: ContentDelta) -> bool:
        """Thoughts that were switched off, of a model that cannot but think; a second call where one was asked for."""
        if isinstance(said, ToolCallStart | ToolCallArguments):
            return self._one_call and said.index > 0
        return isinstance(said, ReasoningDelta) and not self._thinks

    def _close(self) -> Iterator[Event]:
        if self._open:
            yield self._at("content_block_stop")
            self._content.append(self._open.block())
            self._open = None

    def _at(self, what: str, **more: Any) -> Event:
        return {"type": what, "index": len(self._content), **more}

    def _why(self, finish: str) -> dict[str, str | None]:
        found = self._stop_sequence() if finish == "stop" else None
        reasons = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "stop_sequence" if found else "end_turn"}
        return {"stop_reason": reasons[finish], "stop_sequence": found}

    def _stop_sequence(self) -> str | None:
        """Nodes do not tell which string ended an answer, nor whether one did; its tokens do: they are the whole text,
        that string included. As on a node: the one that begins first, of two that begin together the longer."""
        text = self._tokenizer.decode(self._tokens) if self._tokens else ""
        places = [(text.find(stop), -len(stop), stop) for stop in self._stops if stop in text]
        return min(places)[2] if places else None


def _usage(metrics: dict[str, Any]) -> dict[str, int]:
    """What was held already is told apart from what was read."""
    cached = metrics.get("cached_tokens", 0)
    return {
        "input_tokens": metrics.get("prompt_tokens", 0) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": metrics.get("completion_tokens", 0),
    }


class _OpenBlock(ABC):
    """A block that is being written."""

    field = ""

    def __init__(self, said: ContentDelta) -> None:
        self.said, self._pieces = said, [""]

    @property
    def whole(self) -> str:
        return "".join(self._pieces)

    def takes(self, said: ContentDelta) -> bool:
        return type(said) is type(self.said)

    @abstractmethod
    def block(self) -> shapes.Block: ...

    def more(self, text: str) -> Event:
        self._pieces.append(text)
        return {"type": f"{self.field}_delta", self.field: text}


class _TextBlock(_OpenBlock):
    field = "text"

    def block(self) -> shapes.Block:
        return shapes.TextBlock(text=self.whole)


class _ThinkingBlock(_OpenBlock):
    field = "thinking"

    def block(self) -> shapes.Block:
        return shapes.ThinkingBlock(thinking=self.whole)


class _ToolUseBlock(_OpenBlock):
    def takes(self, said: ContentDelta) -> bool:
        return isinstance(said, ToolCallArguments)

    def more(self, text: str) -> Event:
        self._pieces.append(text)
        return {"type": "input_json_delta", "partial_json": text}

    def block(self) -> shapes.Block:
        assert isinstance(self.said, ToolCallStart)
        return shapes.ToolUseBlock(id=_use_id(self.said.id), name=self.said.name, input=_object(self.whole))


def _use_id(call: str) -> str:
    """As Anthropic's begin: some programs look."""
    return f"toolu_{call.removeprefix('call_')}"


def _object(text: str) -> dict[str, Any]:
    """Of an answer that was cut off in a call there is no whole one; `max_tokens` says so."""
    try:
        found = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


_OPENS: dict[type, type[_OpenBlock]] = {
    TextDelta: _TextBlock,
    ReasoningDelta: _ThinkingBlock,
    ToolCallStart: _ToolUseBlock,
}
