"""What both of OpenAI's endpoints tell: events, usage, how likely a token was."""

import logging
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from disaggregated_inference.errors import DisaggError
from disaggregated_inference.gateway.openai.requests import OpenAIRequest
from disaggregated_inference.gateway.request_context import RequestContext
from disaggregated_inference.models.tokenizer import ModelTokenizer
from disaggregated_inference.orchestrator.node_client import Progress

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
_TEXT = b'%b{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}%b'
METRICS_HEADER = "x-disagg-metrics"

_ANSWER = ("response", "tokens", "logprobs", "choices", "finish_reason")  # of a record: the answer, not about it


class CompletionWriter:
    """The frame around one request's choices, whole or in events."""

    def __init__(self, call: RequestContext, asked: OpenAIRequest, prefix: str, kind: str) -> None:
        self._asked = asked
        self._with_metrics = asked.include_metrics or call.request.headers.get(METRICS_HEADER) in ("1", "true")
        self._head = {
            "id": f"{prefix}-{call.id}",
            "object": kind,
            "created": int(time.time()),
            "model": asked.model or call.model(None),
            "system_fingerprint": None,
        }
        # Most of an event is the same every time: it is written once.
        self._before = b"data: " + msgspec.json.encode(self._head)[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if asked.wants_usage else b"]}\n\n"

    def whole(self, choices: list[dict[str, Any]], records: list[dict[str, Any]], thought: int = 0) -> dict[str, Any]:
        told = self._head | {"choices": choices, "usage": usage_of(records, thought)}
        return told | self._metrics(records)

    def event(self, choice: dict[str, Any]) -> bytes:
        return self._before + msgspec.json.encode(choice) + self._after

    def text(self, index: int, text: str) -> bytes:
        """The event of a chat that is nearly every event."""
        return _TEXT % (self._before, index, msgspec.json.encode(text), self._after)

    def progress(self, choice: dict[str, Any], progress: Progress) -> bytes:
        """As llama.cpp does it: a choice that says nothing, and beside it how much of the prompt was read."""
        usage = {"usage": None} if self._asked.wants_usage else {}
        return event(self._head | {"choices": [choice]} | usage | {"prompt_progress": progress})

    def end(self, records: list[dict[str, Any]], thought: int = 0) -> bytes:
        """What comes after the last choice's end."""
        if not self._asked.wants_usage and not self._with_metrics:
            return DONE
        usage = {"usage": usage_of(records, thought)} if self._asked.wants_usage else {}
        return event(self._head | {"choices": []} | usage | self._metrics(records)) + DONE

    def _metrics(self, records: list[dict[str, Any]]) -> dict[str, Any]:
        if not self._with_metrics:
            return {}
        told = [{name: value for name, value in record.items() if name not in _ANSWER} for record in records]
        return {"disagg": told[0] if len(told) == 1 else told}


def event(content: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def failure(error_body: Callable[[Exception], dict[str, Any]]) -> Callable[[Exception], bytes]:
    """A stream's last event, where it ends in an error. Without a [DONE]: nobody should take it for a whole answer."""

    def describe(error: Exception) -> bytes:
        if not isinstance(error, DisaggError):
            log.error("a stream failed", exc_info=error)
        return event(error_body(error))

    return describe


def usage_of(records: list[dict[str, Any]], thought: int) -> dict[str, Any]:
    """Over all prompts of a request."""
    read, written, cached = (
        sum(record[name] for record in records) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")
    )
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": thought},
    }


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token's bytes, how likely it was, and what else was likely there."""

    raw: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]

    @property
    def text(self) -> str:
        return _text(self.raw)


def likely(
    tokenizer: ModelTokenizer, token: int, logprob: float, top: Sequence[dict[str, float]]
) -> TokenLogprob | None:
    """None for what is no text: the tokens that end an answer."""
    if not tokenizer.decode([token]):
        return None
    others = tuple((tokenizer.token_bytes(int(other["token"])), other["logprob"]) for other in top)
    return TokenLogprob(tokenizer.token_bytes(token), logprob, others)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")  # a token may be half a character; its bytes tell which


def in_chat(items: list[TokenLogprob]) -> dict[str, Any]:
    def shown(raw: bytes, logprob: float) -> dict[str, Any]:
        return {"token": _text(raw), "logprob": logprob, "bytes": list(raw)}

    told = [shown(i.raw, i.logprob) | {"top_logprobs": [shown(*other) for other in i.top]} for i in items]
    return {"content": told, "refusal": None}


def in_completion(items: list[TokenLogprob], offset: int) -> dict[str, Any]:
    """`offset`: where in the text the first of them begins. Of tokens that look the same the likeliest is told."""
    texts = [i.text for i in items]
    tops = [{_text(raw): logprob for raw, logprob in reversed(i.top)} for i in items]
    return {
        "tokens": texts,
        "token_logprobs": [i.logprob for i in items],
        "top_logprobs": tops if any(tops) else None,
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=offset)) if items else [],
    }
