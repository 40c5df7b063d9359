"""What OpenAI's completions endpoints write: events, usage, logprobs."""

import time
from collections.abc import AsyncGenerator, Callable
from itertools import accumulate
from typing import Any

import msgspec
from starlette.responses import Response

from disaggregated_inference.api import Progress
from disaggregated_inference.gateway.chat import ChatDelta
from disaggregated_inference.gateway.openai.errors import error_body
from disaggregated_inference.gateway.openai.requests import OpenAIRequest
from disaggregated_inference.gateway.request_context import RequestContext
from disaggregated_inference.http import EventStreamResponse, sse_event
from disaggregated_inference.models import ModelTokenizer
from disaggregated_inference.orchestrator import Delta

DONE = b"data: [DONE]\n\n"
METRICS_HEADER = "x-disagg-metrics"

_COMPLETION_FIELDS = ("response", "tokens", "logprobs", "choices", "finish_reason")  # of a record

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
            "model": request.model or context.model(None),
            "system_fingerprint": None,
        }
        # Most bytes of an event never change: they are encoded once.
        self._before = b"data: " + encode(self._head)[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if request.include_usage else b"]}\n\n"

    def body(self, choices: list[dict[str, Any]], records: list[dict[str, Any]], reasoning: int = 0) -> dict[str, Any]:
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

    def end(self, records: list[dict[str, Any]], reasoning: int = 0) -> bytes:
        """What follows the last choice."""
        if not self._request.include_usage and not self._with_metrics:
            return DONE
        usage = {"usage": usage_of(records, reasoning)} if self._request.include_usage else {}
        return sse_event(self._head | {"choices": []} | usage | self._metrics(records)) + DONE

    def _metrics(self, records: list[dict[str, Any]]) -> dict[str, Any]:
        if not self._with_metrics:
            return {}
        metrics = [{k: v for k, v in record.items() if k not in _COMPLETION_FIELDS} for record in records]
        return {"disagg": metrics[0] if len(metrics) == 1 else metrics}


async def stream_events(context: RequestContext, events: AsyncGenerator[bytes, None]) -> Response:
    """No [DONE] follows an error: the completion is not complete."""
    return EventStreamResponse(context.request, events, lambda error: sse_event(error_body(error)), context.headers)


def usage_of(records: list[dict[str, Any]], reasoning_tokens: int) -> dict[str, Any]:
    """The sum over all prompts of a request."""
    prompt, completion, cached = (
        sum(record[name] for record in records) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")
    )
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


class TokenBytesLogprob(msgspec.Struct, frozen=True):
    """A token's bytes, its logprob, and the alternatives."""

    raw: bytes
    logprob: float
    alternatives: tuple[tuple[bytes, float], ...]

    @property
    def text(self) -> str:
        return _text(self.raw)


class ChoiceLogprobs:
    """The logprobs of one choice since they were last taken. Without a tokenizer there are none."""

    def __init__(
        self, tokenizer: ModelTokenizer | None, describe: Callable[[list[TokenBytesLogprob], int], dict[str, Any]]
    ) -> None:
        self._tokenizer, self._describe, self.wanted = tokenizer, describe, tokenizer is not None
        self._items: list[TokenBytesLogprob] = []
        self._offset = 0

    def add(self, delta: Delta | ChatDelta) -> None:
        if self._tokenizer and delta.token is not None and delta.logprob is not None:
            to_bytes = self._tokenizer.token_bytes
            if self._tokenizer.decode([delta.token]):  # a token without text ends the completion
                alternatives = tuple((to_bytes(each.token), each.logprob) for each in delta.top_logprobs)
                self._items.append(TokenBytesLogprob(to_bytes(delta.token), delta.logprob, alternatives))

    def take(self) -> dict[str, Any] | None:
        if not self._tokenizer:
            return None
        described = self._describe(self._items, self._offset)
        self._offset += sum(len(item.text) for item in self._items)
        self._items = []
        return described


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")  # a token may be a part of a character; its bytes are sent too


def chat_logprobs(items: list[TokenBytesLogprob], offset: int) -> dict[str, Any]:
    def described(raw: bytes, logprob: float) -> dict[str, Any]:
        return {"token": _text(raw), "logprob": logprob, "bytes": list(raw)}

    content = [
        described(item.raw, item.logprob) | {"top_logprobs": [described(*each) for each in item.alternatives]}
        for item in items
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(items: list[TokenBytesLogprob], offset: int) -> dict[str, Any]:
    """`offset`: where the first token begins in the text. Of alternatives with the same text the likeliest stays."""
    texts = [item.text for item in items]
    top = [{_text(raw): logprob for raw, logprob in reversed(item.alternatives)} for item in items]
    return {
        "tokens": texts,
        "token_logprobs": [item.logprob for item in items],
        "top_logprobs": top if any(top) else None,
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=offset)) if items else [],
    }
