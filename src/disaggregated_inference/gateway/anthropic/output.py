"""Anthropic's Messages API: a message while it is generated, and its events."""

import secrets
from collections.abc import Iterator
from typing import Any

import msgspec

from disaggregated_inference.gateway.anthropic.requests import (
    ContentBlock,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from disaggregated_inference.gateway.chat import ChatDelta
from disaggregated_inference.gateway.content_blocks import ContentList, Event, OpenContent
from disaggregated_inference.gateway.tool_parsers.base import ReasoningDelta, TextDelta, ToolCallStart
from disaggregated_inference.http import KEEPALIVE_COMMENT
from disaggregated_inference.models import ModelTokenizer

_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_DELTAS = {
    TextDelta: ("text_delta", "text"),
    ReasoningDelta: ("thinking_delta", "thinking"),
    ToolCallStart: ("input_json_delta", "partial_json"),
}


class AnthropicMessageBuilder:
    """Makes events of deltas. The message starts with the first delta: an earlier error has its own HTTP status."""

    def __init__(self, request: MessagesRequest, model: str, tokenizer: ModelTokenizer) -> None:
        self._id, self._model, self._tokenizer = f"msg_{secrets.token_hex(12)}", model, tokenizer
        self._stop_sequences = request.stop_sequences or []
        self._with_thinking = request.thinking is None or request.thinking.type != "disabled"
        self._tokens: list[int] = []
        self._content = ContentList(_OpenBlock, bool(request.tool_choice.disable_parallel_tool_use))
        self._started = False
        self.start_sent = False  # the client has message_start
        self._stop: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}
        self._usage = _usage()

    def message(self) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        return head | {"content": self._content.finished, **self._stop, "usage": self._usage}

    def keepalive(self) -> bytes:
        """message_start must be the first event; before it, a comment keeps the connection alive."""
        return _PING if self.start_sent else KEEPALIVE_COMMENT

    def take(self, delta: ChatDelta) -> list[Event]:
        if delta.progress:
            total = delta.progress.total  # the prefill computes the last token at least
            self._usage = _usage(total, min(delta.progress.cache, total - 1))
            return []
        if delta.waiting:
            return []
        return [*self._opening(), *self._events(delta)]

    def _opening(self) -> Iterator[Event]:
        """The prefill node's cached tokens are known at the end only: `message_delta` has the final usage."""
        if not self._started:
            self._started = True
            yield {"type": "message_start", "message": self.message() | {"content": []}}
            yield {"type": "ping"}

    def _events(self, delta: ChatDelta) -> Iterator[Event]:
        if self._stop_sequences and delta.token is not None:
            self._tokens.append(delta.token)
        for piece in delta.content:
            if self._with_thinking or not isinstance(piece, ReasoningDelta):  # some models think although they must not
                yield from self._content.add(piece)
        if delta.finish_reason:
            yield from self._content.close()
            self._stop = self._stop_fields(delta.finish_reason)
        if delta.record:
            self._usage = _usage(delta.record.prompt_tokens, delta.record.cached_tokens, delta.record.completion_tokens)
            yield {"type": "message_delta", "delta": self._stop, "usage": self._usage}
            yield {"type": "message_stop"}

    def _stop_fields(self, finish: str) -> dict[str, str | None]:
        sequence = self._stop_sequence() if finish == "stop" else None
        reasons = {
            "length": "max_tokens",
            "tool_calls": "tool_use",
            "stop": "stop_sequence" if sequence else "end_turn",
        }
        return {"stop_reason": reasons[finish], "stop_sequence": sequence}

    def _stop_sequence(self) -> str | None:
        """Nodes do not report which string ended the completion. The tokens include that string. As on a node: the
        first one in the text counts, and of two at the same place the longer."""
        text = self._tokenizer.decode(self._tokens) if self._tokens else ""
        places = [(text.find(stop), -len(stop), stop) for stop in self._stop_sequences if stop in text]
        return min(places)[2] if places else None


def _usage(prompt: int = 0, cached: int = 0, completion: int = 0) -> dict[str, int]:
    """Input tokens are those that were not cached."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": completion,
    }


class _OpenBlock(OpenContent):
    def start(self) -> Iterator[Event]:
        yield {"type": "content_block_start", "index": self.index, "content_block": self.content(False)}

    def delta(self, text: str) -> Event:
        kind, field = _DELTAS[type(self.first)]
        return {"type": "content_block_delta", "index": self.index, "delta": {"type": kind, field: text}}

    def finish(self, complete: bool) -> Iterator[Event]:
        yield {"type": "content_block_stop", "index": self.index}

    def content(self, complete: bool) -> ContentBlock:
        if isinstance(self.first, ToolCallStart):
            id = f"toolu_{self.first.id.removeprefix('call_')}"  # some programs check how an id begins
            return ToolUseBlock(id=id, name=self.first.name, input=_parsed_arguments(self.text))
        is_thinking = isinstance(self.first, ReasoningDelta)
        return ThinkingBlock(thinking=self.text) if is_thinking else TextBlock(text=self.text)


def _parsed_arguments(text: str) -> dict[str, Any]:
    """Empty where the completion was cut off within the call; the stop reason is max_tokens then."""
    try:
        found = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
