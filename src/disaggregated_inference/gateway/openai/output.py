"""What OpenAI's completions endpoints write: events, usage, logprobs."""

import codecs
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from disaggregated_inference.api import Progress, PromptLogprobs, RequestRecord, TopLogprob
from disaggregated_inference.gateway.chat import ChatDelta
from disaggregated_inference.gateway.openai.errors import error_body
from disaggregated_inference.gateway.openai.requests import OpenAIRequest
from disaggregated_inference.gateway.request_context import RequestContext
from disaggregated_inference.http import EventStreamResponse, sse_event
from disaggregated_inference.models import ModelTokenizer
from disaggregated_inference.orchestrator import Delta

DONE = b"data: [DONE]\n\n"
METRICS_HEADER = "x-disagg-metrics"

_UTF8 = codecs.getincrementaldecoder("utf-8")

encode = msgspec.json.Encoder().encode


class CompletionWriter:
    """The frame around the choices of one request, as one body or as events."""

    def __init__(self, context: RequestContext, request: OpenAIRequest, prefix: str, kind: str) -> None:
        self._request = request
        self._with_metrics = request.include_metrics or context.request.headers.get(METRICS_HEADER) in ("1", "true")
        self._head = {
            "id": f"{prefix}-{context.id}",
            "object": f"{kind}.chunk" if request.stream and kind == "chat.completion" else kind,
            "created": int(time.time()),
            "model": context.shown_model,
            "system_fingerprint": None,
        }
        # Most bytes of an event never change: they are encoded once.
        self._before = b"data: " + encode(self._head)[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if request.include_usage else b"]}\n\n"

    def body(self, choices: list[dict[str, Any]], records: list[RequestRecord], reasoning: int = 0) -> dict[str, Any]:
        usage = {"usage": usage_of(records, reasoning)}
        return self._head | {"choices": choices} | usage | self._metrics(records)

    def event(self, choice: dict[str, Any]) -> bytes:
        return self._before + encode(choice) + self._after

    def text_frame(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the text in an event of chat completions that has nothing but text."""
        before = b'%b{"index":%d,"delta":{"content":' % (self._before, index)
        return before, b'},"logprobs":null,"finish_reason":null}' + self._after

    def progress(self, choice: dict[str, Any], progress: Progress) -> bytes:
        """As llama.cpp does it: an empty choice, and beside it how much of the prompt was read."""
        usage = {"usage": None} if self._request.include_usage else {}
        return sse_event(self._head | {"choices": [choice]} | usage | {"prompt_progress": progress})

    def end(self, records: list[RequestRecord], reasoning: int = 0) -> bytes:
        """What follows the last choice."""
        if not self._request.include_usage and not self._with_metrics:
            return DONE
        usage = {"usage": usage_of(records, reasoning)} if self._request.include_usage else {}
        return sse_event(self._head | {"choices": []} | usage | self._metrics(records)) + DONE

    def _metrics(self, records: list[RequestRecord]) -> dict[str, Any]:
        if not self._with_metrics:
            return {}
        metrics = [record.metrics() for record in records]
        return {"disagg": metrics[0] if len(metrics) == 1 else metrics}


async def stream_events(context: RequestContext, events: AsyncGenerator[bytes, None]) -> Response:
    """No [DONE] follows an error: the completion is not complete."""
    return EventStreamResponse(context.request, events, lambda error: sse_event(error_body(error)), context.headers)


def usage_of(records: list[RequestRecord], reasoning_tokens: int) -> dict[str, Any]:
    """The sum over all prompts of a request."""
    prompt, completion = sum(each.prompt_tokens for each in records), sum(each.completion_tokens for each in records)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in records)},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


class TokenBytesLogprob(msgspec.Struct, frozen=True):
    """A token's bytes, its logprob (the first token of a prompt has none), the alternatives, and where it begins."""

    raw: bytes
    logprob: float | None
    alternatives: tuple[tuple[bytes, float], ...]
    offset: int

    @property
    def text(self) -> str:
        return _text(self.raw)


class ChoiceLogprobs:
    """The logprobs of one choice since they were last taken. Without a tokenizer there are none. `echo` is the prompt
    that the text of the choice begins with."""

    def __init__(
        self,
        tokenizer: ModelTokenizer | None,
        describe: Callable[[list[TokenBytesLogprob]], dict[str, Any]],
        echo: str | None = None,
    ) -> None:
        self._tokenizer, self._describe, self.wanted = tokenizer, describe, tokenizer is not None
        self._items: list[TokenBytesLogprob] = []
        self._echo, self._prompt_offsets, self._offsets = echo, _Offsets(0), _Offsets(len(echo or ""))

    def add(self, delta: Delta | ChatDelta) -> None:
        if self._tokenizer and delta.token is not None and delta.logprob is not None:
            has_text = bool(self._tokenizer.decode([delta.token]))
            if has_text or self._echo is not None:  # a token without text ends the completion; echo shows it too
                offset = self._offsets.next(self._tokenizer.token_bytes(delta.token) if has_text else b"")
                self._add(delta.token, delta.logprob, delta.top_logprobs, offset)

    def add_prompt(self, piece: PromptLogprobs) -> None:
        if self._tokenizer:
            for each in piece.tokens:
                offset = self._prompt_offsets.next(self._tokenizer.token_bytes(each.token))
                self._add(each.token, each.logprob, each.top_logprobs, min(offset, len(self._echo or "")))

    def _add(self, token: int, logprob: float | None, top: Sequence[TopLogprob], offset: int) -> None:
        assert self._tokenizer
        to_bytes = self._tokenizer.token_bytes
        alternatives = tuple((to_bytes(each.token), each.logprob) for each in top)
        self._items.append(TokenBytesLogprob(to_bytes(token), logprob, alternatives, offset))

    def take(self) -> dict[str, Any] | None:
        if not self._tokenizer:
            return None
        items, self._items = self._items, []
        return self._describe(items)


class _Offsets:
    """Where tokens begin in a text, in characters. One that continues a character begins where that character does."""

    def __init__(self, start: int) -> None:
        self._at, self._decoder = start, _UTF8("replace")

    def next(self, raw: bytes) -> int:
        begin = self._at
        self._at += len(self._decoder.decode(raw))
        return begin


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")  # a token may be a part of a character; its bytes are sent too


def chat_logprobs(items: list[TokenBytesLogprob]) -> dict[str, Any]:
    def described(raw: bytes, logprob: float | None) -> dict[str, Any]:
        return {"token": _text(raw), "logprob": logprob, "bytes": list(raw)}

    content = [
        described(item.raw, item.logprob) | {"top_logprobs": [described(*each) for each in item.alternatives]}
        for item in items
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(items: list[TokenBytesLogprob]) -> dict[str, Any]:
    """Of alternatives with the same text the likeliest stays."""
    top = [
        None if item.logprob is None else {_text(raw): logprob for raw, logprob in reversed(item.alternatives)}
        for item in items
    ]
    return {
        "tokens": [item.text for item in items],
        "token_logprobs": [item.logprob for item in items],
        "top_logprobs": top if any(top) else None,
        "text_offset": [item.offset for item in items],
    }
