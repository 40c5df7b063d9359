"""What Ollama's programs are told: one JSON object a line, times in nanoseconds."""

from datetime import UTC, datetime
from typing import Any

import msgspec

from disaggregated_inference.gateway.chat import ChatDelta
from disaggregated_inference.gateway.tool_parsers.base import (
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from disaggregated_inference.models.tokenizer import ModelTokenizer

_BEFORE_READING = ("queue", "admission", "canary", "prefill queue", "load")  # of the waterfall


class OllamaChunk(msgspec.Struct):
    """Of an answer, what is told together."""

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
    """One answer. `name` is the model's as it was asked for: programs compare. A tool call is told when it is whole."""

    def __init__(self, name: str, in_chat: bool, tokenizer: ModelTokenizer) -> None:
        self._name, self._in_chat, self._tokenizer = name, in_chat, tokenizer
        self._call: ToolCallStart | None = None
        self._arguments = ""
        self._reason = "stop"

    def piece(self, part: ChatDelta) -> OllamaChunk:
        piece = OllamaChunk(logprobs=self._likely(part))
        for said in part.said:
            if isinstance(said, TextDelta):
                piece.text += said.text
            elif isinstance(said, ReasoningDelta):
                piece.thinking += said.text
            elif isinstance(said, ToolCallArguments):
                self._arguments += said.text
            else:
                self._close_call(piece)
                self._call = said
        if part.finish_reason:
            self._close_call(piece)
            self._reason = "length" if part.finish_reason == "length" else "stop"
        return piece

    def _close_call(self, piece: OllamaChunk) -> None:
        """One that was cut off is told as text: half of its arguments must not be taken for all of them."""
        if not self._call:
            return
        try:
            function = {"name": self._call.name, "arguments": msgspec.json.decode(self._arguments or "{}")}
            piece.calls.append({"id": self._call.id, "function": function})
        except (ValueError, RecursionError):
            piece.text += self._arguments
        self._call, self._arguments = None, ""

    def _likely(self, part: ChatDelta) -> list[dict[str, Any]]:
        if part.logprob is None or part.token is None:
            return []
        others = [self._one(int(each["token"]), each["logprob"]) for each in part.top_logprobs]
        return [self._one(part.token, part.logprob) | ({"top_logprobs": others} if others else {})]

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}

    def told(self, piece: OllamaChunk, **last: Any) -> dict[str, Any]:
        head = {"model": self._name, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}
        likely = {"logprobs": piece.logprobs} if piece.logprobs else {}
        return head | self._content(piece) | likely | {"done": False} | last

    def _content(self, piece: OllamaChunk) -> dict[str, Any]:
        thinking = {"thinking": piece.thinking} if piece.thinking else {}
        if not self._in_chat:
            return {"response": piece.text} | thinking
        calls = {"tool_calls": piece.calls} if piece.calls else {}
        return {"message": {"role": "assistant", "content": piece.text} | thinking | calls}

    def end(self, metrics: dict[str, Any], whole: OllamaChunk | None = None) -> dict[str, Any]:
        """The last line; the only one, where all of the answer is in it."""
        return self.told(whole or OllamaChunk(), done=True, done_reason=self._reason, **_figures(metrics))

    def loaded(self) -> dict[str, Any]:
        return self.told(OllamaChunk(), done=True, done_reason="load")


def line(content: dict[str, Any]) -> bytes:
    return msgspec.json.encode(content) + b"\n"


def _figures(metrics: dict[str, Any]) -> dict[str, int]:
    """No duration is 0: programs divide by them. Only an Ollama loads for a request, so what stands for it is all the
    waiting before its prompt was read."""
    phases = metrics.get("waterfall") or ()
    waited_s = sum(phase["seconds"] for phase in phases if phase["name"] in _BEFORE_READING)
    return {
        "total_duration": _nanoseconds(metrics["total_time"]),
        "load_duration": _nanoseconds(waited_s),
        "prompt_eval_count": metrics["prompt_tokens"],
        "prompt_eval_duration": _nanoseconds(metrics["prefill_time"]),
        "eval_count": metrics["completion_tokens"],
        "eval_duration": _nanoseconds(metrics["decode_time"]),
    }


def _nanoseconds(seconds: float) -> int:
    return max(1, round(seconds * 1e9))
