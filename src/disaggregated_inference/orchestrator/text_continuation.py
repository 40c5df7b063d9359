"""Builds the node requests of each attempt for nodes that take text.

Before the first text another node begins anew. After it, the next node gets the text so far and continues it: it may
tokenize that text otherwise, so the result carries a warning. Reasoning or a tool call that has begun cannot be
continued, nor can an answer whose chat template closes it (the node says so). Then the request fails, with the reason.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from disaggregated_inference.api import (
    DecodeRequest,
    GeneratedChoice,
    GenerateRequest,
    ModelInfo,
    StreamEvent,
    TextGenerateRequest,
)
from disaggregated_inference.errors import BadRequest, ClusterError, PromptLogprobsUnsupported
from disaggregated_inference.kv import Salt, salt_of
from disaggregated_inference.orchestrator.attempt import Attempt
from disaggregated_inference.orchestrator.cluster_view import Route, RouteRequest
from disaggregated_inference.orchestrator.continuation import Numbers
from disaggregated_inference.orchestrator.leg_errors import NodeRefused
from disaggregated_inference.orchestrator.prompt_logprobs import PromptLogprobsState
from disaggregated_inference.orchestrator.recorder import ChoiceState, RequestRecorder
from disaggregated_inference.orchestrator.registry import NodeRegistry
from disaggregated_inference.orchestrator.stream_check import StreamCheck, TextStreamCheck

CONTINUED_WARNING = "Another node continued from the text - tokens may differ"

_TOKEN_BYTES = 3  # most texts have a little more: an estimate with reserve
_IMAGE_TOKENS = 768  # as on the node
_MAX_TOKEN_BYTES = 8  # as on the node: a text has at least this few tokens


@dataclass(slots=True)
class TextChoiceState(ChoiceState):
    """One choice, of which there is only text. `written` stays empty: the ids are unknown."""

    thinking: list[str] = field(default_factory=list)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    pieces: int = 0  # about as many as tokens
    counted: int | None = None  # tokens, once the node has reported them

    @property
    def tokens(self) -> int:
        return self.pieces if self.counted is None else self.counted

    @property
    def can_continue(self) -> bool:
        return not self.thinking and not self.tool_calls

    def take(self, event: StreamEvent) -> None:
        self.pieces += bool(event.text or event.thinking or event.tool_calls)
        self.text.append(event.text)
        self.thinking += [event.thinking] if event.thinking else []
        self.tool_calls += event.tool_calls
        self.finish_reason = event.finish_reason

    def result(self, index: int) -> GeneratedChoice:
        return GeneratedChoice(
            index=index,
            text="".join(self.text),
            tokens=None,
            finish_reason=self.finish_reason,
            thinking="".join(self.thinking),
            tool_calls=tuple(self.tool_calls),
        )


class TextContinuation:
    """Such engines generate one choice per request."""

    separate_choices = True
    can_transfer_kv = False

    def __init__(self, registry: NodeRegistry, model: str, request: GenerateRequest, recorder: RequestRecorder) -> None:
        if request.tokens is not None:
            raise BadRequest(
                f"tokens: {model} is served by an engine that takes text; give prompt or messages", "tokens"
            )
        if request.prompt_logprobs is not None:
            raise PromptLogprobsUnsupported(
                f"prompt_logprobs: {model} is served by an engine that takes text and scores no prompts; leave it out"
            )
        self._registry, self._model, self._request, self._recorder = registry, model, request, recorder
        self.prompt_logprobs = PromptLogprobsState(None, [])
        self.salt = Salt(salt_of(request.cache_salt or ""))
        self.choice_states = [TextChoiceState() for _ in range(request.n)]
        assert request.max_tokens is not None
        self._max_tokens: int = request.max_tokens
        self._pieces_before: dict[Numbers, int] = {}

    def prompt(self, numbers: Numbers) -> list[int]:
        return []

    def _left(self, numbers: Numbers) -> int:
        return max(1, self._max_tokens - self.choice_states[numbers[0]].pieces)

    def route_request(self, numbers: Numbers, avoid: frozenset[str]) -> RouteRequest:
        tokens = _text_bytes(self._request) // _MAX_TOKEN_BYTES
        return RouteRequest(model=self._model, prompt_tokens=tokens, max_tokens=self._left(numbers), avoid=avoid)

    def decode_request(self, numbers: Numbers, timeout_s: float, context: str | None) -> TextGenerateRequest:
        request, params = self._request, self._request.sampling()
        seed = None if request.seed is None else request.seed + numbers[0]
        return TextGenerateRequest(
            prompt=request.prompt,
            messages=request.messages,
            template=request.template,
            stream=True,
            timeout_s=timeout_s,
            cache_salt=self.salt.value,
            written_text="".join(self.choice_states[numbers[0]].text),
            **params | {"n": 1, "max_tokens": self._left(numbers), "seed": seed},
        )

    def stream_check(self, numbers: Numbers, request: DecodeRequest, model: ModelInfo | None) -> StreamCheck:
        return TextStreamCheck()

    def explain(self, route: Route, reason: str) -> str:
        status = self._registry.nodes[route.decode].status
        return f"whole on {route.decode}: {status.backend if status else 'its engine'} cannot import KV"

    def is_output(self, event: StreamEvent) -> bool:
        return not event.done and event.error is None and event.progress is None

    def warning(self, numbers: Numbers) -> str | None:
        self._pieces_before[numbers] = self.choice_states[numbers[0]].pieces
        return CONTINUED_WARNING if self._pieces_before[numbers] else None

    def refused(self, error: NodeRefused, numbers: Numbers, cause: str) -> Exception:
        """A refusal to continue is not the client's fault."""
        return ClusterError(f"{cause}; {error}") if self._pieces_before[numbers] else error

    def finished(self, attempt: Attempt, numbers: Numbers, prompt: list[int]) -> None:
        """The written text was part of this attempt's prompt."""
        state, before, metrics = self.choice_states[numbers[0]], self._pieces_before[numbers], attempt.metrics
        reported = metrics.completion_tokens if metrics else 0
        state.counted = before + (reported or state.pieces - before)
        if metrics and metrics.prompt_tokens:
            self._recorder.prompt_tokens = max(0, metrics.prompt_tokens - before)

    def can_continue(self) -> bool:
        return all(state.can_continue for state in self.choice_states)


def estimated_tokens(request: GenerateRequest) -> int:
    """On the large side, to reckon what is left of a context window."""
    messages = request.messages or []
    images = [message["images"] for message in messages if isinstance(message.get("images"), list)]
    return _prompt_bytes(request) // _TOKEN_BYTES + sum(map(len, images)) * _IMAGE_TOKENS + 64


def _text_bytes(request: GenerateRequest) -> int:
    """Of the text that is in the prompt with any chat template."""
    texts = [request.prompt or "", *(str(message.get("content") or "") for message in request.messages or [])]
    return sum(len(text.encode(errors="replace")) for text in texts)


def _prompt_bytes(request: GenerateRequest) -> int:
    """Of all that may be in the prompt as text: tools, reasoning and tool calls included."""
    messages = [{name: message[name] for name in message if name != "images"} for message in request.messages or []]
    text = json.dumps([request.prompt, messages, request.template], ensure_ascii=False, default=str)
    return len(text.encode(errors="replace"))
