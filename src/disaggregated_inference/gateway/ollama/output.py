"""What Ollama's API writes: one JSON object per line, times in nanoseconds."""

from datetime import UTC, datetime
from typing import Any

import msgspec

from disaggregated_inference.api import RequestRecord
from disaggregated_inference.gateway.chat import ChatDelta
from disaggregated_inference.gateway.tool_parsers.base import (
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from disaggregated_inference.models import ModelTokenizer

_BEFORE_PREFILL = ("queue", "admission", "canary", "prefill queue")  # phases of the waterfall


class OllamaChunk(msgspec.Struct):
    """The content of one line."""

    text: str = ""
    thinking: str = ""
    calls: list[dict[str, Any]] = []
    logprobs: list[dict[str, Any]] = []

    def __bool__(self) -> bool:
        return bool(self.text or self.thinking or self.calls or self.logprobs)

    def add(self, other: "OllamaChunk") -> None:
        self.text += other.text
        self.thinking += other.thinking
        self.calls += other.calls
        self.logprobs += other.logprobs


class OllamaWriter:
    """Writes one completion. `name`: the model as the client named it, because programs compare. A tool call is written
    once it is complete."""

    def __init__(self, name: str, is_chat: bool, tokenizer: ModelTokenizer) -> None:
        self._name, self._is_chat, self._tokenizer = name, is_chat, tokenizer
        self._call: ToolCallStart | None = None
        self._arguments = ""
        self._done_reason = "stop"
        self._taken, self._record = OllamaChunk(), RequestRecord()

    def take(self, delta: ChatDelta) -> None:
        """Without a stream: `end` has all of the content."""
        self._taken.add(self.chunk(delta))
        self._record = delta.record or self._record

    def line(self, delta: ChatDelta) -> bytes:
        """Empty if there is nothing to send."""
        if delta.record:
            self._record = delta.record
            return encode_line(self.end())
        if delta.waiting:  # NDJSON has no comments: an empty line of content with a field that programs ignore
            return encode_line(self.body(OllamaChunk(), waiting=delta.waiting))
        chunk = self.chunk(delta)
        return encode_line(self.body(chunk)) if chunk else b""

    def chunk(self, delta: ChatDelta) -> OllamaChunk:
        chunk = OllamaChunk(logprobs=self._logprobs(delta))
        for piece in delta.content:
            if isinstance(piece, TextDelta):
                chunk.text += piece.text
            elif isinstance(piece, ReasoningDelta):
                chunk.thinking += piece.text
            elif isinstance(piece, ToolCallArguments):
                self._arguments += piece.text
            else:
                self._close_call(chunk)
                self._call = piece
        if delta.finish_reason:
            self._close_call(chunk)
            self._done_reason = "length" if delta.finish_reason == "length" else "stop"
        return chunk

    def _close_call(self, chunk: OllamaChunk) -> None:
        """A call that was cut off becomes text: its arguments are not complete."""
        if not self._call:
            return
        try:
            function = {"name": self._call.name, "arguments": msgspec.json.decode(self._arguments or "{}")}
            chunk.calls.append({"id": self._call.id, "function": function})
        except (ValueError, RecursionError):
            chunk.text += self._arguments
        self._call, self._arguments = None, ""

    def _logprobs(self, delta: ChatDelta) -> list[dict[str, Any]]:
        if delta.logprob is None or delta.token is None:
            return []
        top = [self._logprob(each.token, each.logprob) for each in delta.top_logprobs]
        return [self._logprob(delta.token, delta.logprob) | ({"top_logprobs": top} if top else {})]

    def _logprob(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}

    def body(self, chunk: OllamaChunk, **last: Any) -> dict[str, Any]:
        head = {"model": self._name, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}
        logprobs = {"logprobs": chunk.logprobs} if chunk.logprobs else {}
        return head | self._content(chunk) | logprobs | {"done": False} | last

    def _content(self, chunk: OllamaChunk) -> dict[str, Any]:
        thinking = {"thinking": chunk.thinking} if chunk.thinking else {}
        if not self._is_chat:
            return {"response": chunk.text} | thinking
        calls = {"tool_calls": chunk.calls} if chunk.calls else {}
        return {"message": {"role": "assistant", "content": chunk.text} | thinking | calls}

    def end(self) -> dict[str, Any]:
        """The last line; without a stream the only one."""
        return self.body(self._taken, done=True, done_reason=self._done_reason, **_durations(self._record))

    def loaded(self) -> dict[str, Any]:
        return self.body(OllamaChunk(), done=True, done_reason="load")


def encode_line(content: dict[str, Any]) -> bytes:
    return msgspec.json.encode(content) + b"\n"


def _durations(record: RequestRecord) -> dict[str, int]:
    """No duration is 0, because programs divide by them. The load duration is all waiting before the prefill."""
    waited_s = sum(phase.seconds for phase in record.waterfall if phase.name in _BEFORE_PREFILL)
    return {
        "total_duration": _nanoseconds(record.total_time),
        "load_duration": _nanoseconds(waited_s + (record.load_time or 0.0)),
        "prompt_eval_count": record.prompt_tokens,
        "prompt_eval_duration": _nanoseconds(record.prefill_time),
        "eval_count": record.completion_tokens,
        "eval_duration": _nanoseconds(record.decode_time),
    }


def _nanoseconds(seconds: float) -> int:
    return max(1, round(seconds * 1e9))
