"""A request's life where no cache can move: the text goes to one node, which does everything.

Failover is by text, too. Before the first of it another node begins anew. After it the next one is given what was
written, and goes on: it reads the text as its own tokens, which may be others, and so the result carries a warning. A
thought or a tool call that was begun cannot be gone on with; nor can an answer whose model's template closes it (the
node says so). Then the request fails, with the reason: an honest error is better than an answer with a seam in it.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from disaggregated_inference.errors import BadRequest, ClusterError
from disaggregated_inference.orchestrator.cluster_view import Route, RouteRequest
from disaggregated_inference.orchestrator.node_client import LegFailed, NodeRefused, TokenEvent
from disaggregated_inference.orchestrator.node_state import NodeState
from disaggregated_inference.orchestrator.recorder import Attempt, ChoiceState, RequestRecorder
from disaggregated_inference.orchestrator.registry import NodeRegistry
from disaggregated_inference.orchestrator.request import GenerateRequest
from disaggregated_inference.orchestrator.runner import RequestRunner

SEAM = "Another node went on from the text - tokens may differ"

_TOKEN_BYTES = 3  # of most texts a little more: a guess that leaves room
_IMAGE_TOKENS = 768  # as a node has it
_MOST_TOKEN_BYTES = 8  # as a node has it: so few tokens a text has at least


@dataclass(slots=True)
class TextChoiceState(ChoiceState):
    """One choice, of which there is text alone. `written` stays empty: nobody knows the ids."""

    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    pieces: int = 0  # that came: about as many as tokens
    counted: int | None = None  # tokens, once the node has said it

    @property
    def tokens(self) -> int:
        return self.pieces if self.counted is None else self.counted

    @property
    def can_go_on(self) -> bool:
        return not self.thoughts and not self.calls

    def take(self, event: TokenEvent) -> None:
        self.pieces += bool(event.text or event.thinking or event.tool_calls)
        self.text.append(event.text)
        self.thoughts += [event.thinking] if event.thinking else []
        self.calls += event.tool_calls
        self.finish = event.finish_reason

    def told(self) -> dict[str, Any]:
        found: dict[str, Any] = {"text": "".join(self.text), "tokens": None, "finish_reason": self.finish}
        found |= {"thinking": "".join(self.thoughts)} if self.thoughts else {}
        return found | ({"tool_calls": self.calls} if self.calls else {})


class TextRequestRunner(RequestRunner):
    def __init__(
        self, registry: NodeRegistry, ask: GenerateRequest, model: str, record: RequestRecorder, deadline: float
    ) -> None:
        if ask.tokens is not None:
            raise BadRequest(f"tokens: {model} is served by an engine that takes text; give prompt or messages")
        super().__init__(registry, ask, model, [], record, deadline)
        self._choice_states = [TextChoiceState() for _ in range(ask.n)]
        self.choice_states = record.choice_states = list(self._choice_states)

    async def _write(self, numbers: tuple[int, ...]) -> None:
        """Choices are requests of their own: nobody reads a prompt once for several of them here."""
        await self._apart(numbers)

    def _question(self, numbers: tuple[int, ...]) -> RouteRequest:
        epochs = self._registry.epochs(self._model)
        return RouteRequest(
            model=self._model,
            prompt_tokens=_size_bytes(self._ask) // _MOST_TOKEN_BYTES,
            max_tokens=self._left(numbers),
            avoid=frozenset(name for name, epoch in self._failover.avoid if epochs.get(name) == epoch),
        )

    def _choose(self, numbers: tuple[int, ...]) -> tuple[Route, str]:
        option, _ = super()._choose(numbers)
        status = self._registry.nodes[option.decode].status
        engine = status.backend if status else "its engine"
        return option, f"whole on {option.decode}: {engine} cannot import KV"

    def _keeps_policy(self, option: Route) -> bool:
        return True  # there is one way, whatever the policies say about two

    def _falls_back(self, option: Route) -> bool:
        return False

    def _left(self, numbers: tuple[int, ...]) -> int:
        assert self._ask.max_tokens is not None
        return max(1, self._ask.max_tokens - self._choice_states[numbers[0]].pieces)

    def _body(self, numbers: tuple[int, ...], prompt: list[int]) -> dict[str, Any]:
        ask, choice_state = self._ask, self._choice_states[numbers[0]]
        body = self._sampling | {"n": 1, "max_tokens": self._left(numbers), "timeout_s": self._left_s()}
        body |= {"messages": ask.messages} if ask.messages is not None else {"prompt": ask.prompt}
        if ask.template:
            body["template"] = ask.template
        if "seed" in body:
            body["seed"] += numbers[0]
        if written := "".join(choice_state.text):
            body["written_text"] = written
        return body

    async def _attempt(self, attempt: Attempt, option: Route, numbers: tuple[int, ...]) -> None:
        choice_state = self._choice_states[numbers[0]]
        before = choice_state.pieces
        self.record.warning = SEAM if before else self.record.warning
        try:
            await super()._attempt(attempt, option, numbers)
        except NodeRefused as refused:
            if not before:
                raise
            raise ClusterError(f"{self.record.failovers[-1].message}; {refused}") from refused
        choice_state.counted = before + int(attempt.metrics.get("completion_tokens") or choice_state.pieces - before)
        if counted := attempt.metrics.get("prompt_tokens"):
            self.record.prompt_tokens = max(0, counted - before)  # what was written was read again

    def _is_piece(self, event: TokenEvent) -> bool:
        return not event.done and event.error is None and event.progress is None

    def _learn(self, failure: LegFailed, attempt: Attempt) -> bool:
        return super()._learn(failure, attempt) and all(choice_state.can_go_on for choice_state in self._choice_states)

    def _succeeded(
        self,
        attempt: Attempt,
        decode: NodeState,
        prefill: NodeState | None,
        prompt: list[int],
        numbers: tuple[int, ...],
    ) -> None:
        """Nothing is remembered: who holds which beginning is the engine's own business."""


def about_tokens(ask: GenerateRequest) -> int:
    """A guess, on the large side: for whoever wants to know what is left of a window."""
    images = [message["images"] for message in ask.messages or [] if isinstance(message.get("images"), list)]
    return _most_bytes(ask) // _TOKEN_BYTES + sum(map(len, images)) * _IMAGE_TOKENS + 64


def _size_bytes(ask: GenerateRequest) -> int:
    """Of what is in the prompt whatever the template is."""
    texts = [ask.prompt or "", *(str(message.get("content") or "") for message in ask.messages or [])]
    return sum(len(text.encode(errors="replace")) for text in texts)


def _most_bytes(ask: GenerateRequest) -> int:
    """Of all that may be in the prompt as text: tools, thoughts and calls, too."""
    messages = [{name: message[name] for name in message if name != "images"} for message in ask.messages or []]
    text = json.dumps([ask.prompt, messages, ask.template], ensure_ascii=False, default=str)
    return len(text.encode(errors="replace"))
