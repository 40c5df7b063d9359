"""Builds the node requests of each attempt, by token ids: after a failure no token is lost or repeated.

`text_continuation.py` is the same for nodes that take text.
"""

from typing import Any, Protocol

import msgspec

from disaggregated_inference.api import DecodeRequest, GenerateRequest, ModelInfo, StreamEvent
from disaggregated_inference.kv import Salt, salt_of
from disaggregated_inference.models import ModelTokenizer
from disaggregated_inference.orchestrator.attempt import Attempt
from disaggregated_inference.orchestrator.cluster_view import Route, RouteRequest
from disaggregated_inference.orchestrator.leg_errors import NodeRefused
from disaggregated_inference.orchestrator.prompt_logprobs import PromptLogprobsState
from disaggregated_inference.orchestrator.recorder import ChoiceState
from disaggregated_inference.orchestrator.registry import NodeRegistry
from disaggregated_inference.orchestrator.stream_check import StreamCheck, TokenStreamCheck

Numbers = tuple[int, ...]  # of the choices that one attempt generates


class Continuation(Protocol):
    """The interface of token and text continuations."""

    choice_states: list[Any]
    separate_choices: bool  # each choice is a request of its own from the start
    can_transfer_kv: bool  # KV can move between nodes
    prompt_logprobs: PromptLogprobsState
    salt: Salt  # of the prefixes on all nodes, in every attempt

    def prompt(self, numbers: Numbers) -> list[int]: ...
    def route_request(self, numbers: Numbers, avoid: frozenset[str]) -> RouteRequest: ...
    def decode_request(self, numbers: Numbers, timeout_s: float, context: str | None) -> DecodeRequest: ...
    def stream_check(self, numbers: Numbers, request: DecodeRequest, model: ModelInfo | None) -> StreamCheck: ...
    def explain(self, route: Route, reason: str) -> str: ...
    def is_output(self, event: StreamEvent) -> bool: ...
    def warning(self, numbers: Numbers) -> str | None: ...
    def refused(self, error: NodeRefused, numbers: Numbers, cause: str) -> Exception: ...
    def finished(self, attempt: Attempt, numbers: Numbers, prompt: list[int]) -> None: ...
    def can_continue(self) -> bool: ...


class TokenContinuation:
    """Before the first token the next attempt asks for the whole answer; after it, the prompt and the written tokens
    are the new prompt. With one seed the tokens are the same."""

    separate_choices = False
    can_transfer_kv = True

    def __init__(
        self,
        registry: NodeRegistry,
        model: str,
        request: GenerateRequest,
        tokens: list[int],
        tokenizer: ModelTokenizer | None = None,
        shared_tokens: int = 0,
    ) -> None:
        self._registry, self._model, self._request, self._tokens = registry, model, request, tokens
        self._tokenizer = tokenizer  # checks that the text of nodes is that of their tokens
        self.choice_states = [ChoiceState() for _ in range(request.n)]
        assert request.max_tokens is not None
        self._max_tokens: int = request.max_tokens
        self._params = request.sampling() | {"prompt_logprobs": None}
        self.prompt_logprobs = PromptLogprobsState(request.prompt_logprobs, tokens)
        self.salt = Salt(salt_of(request.cache_salt or ""), shared_tokens)

    def prompt(self, numbers: Numbers) -> list[int]:
        return self._tokens + self._written(numbers)

    def _written(self, numbers: Numbers) -> list[int]:
        """Several choices share a prompt only as long as none has a token."""
        return self.choice_states[numbers[0]].written if len(numbers) == 1 else []

    def route_request(self, numbers: Numbers, avoid: frozenset[str]) -> RouteRequest:
        prompt, epochs = self.prompt(numbers), self._registry.epochs(self._model)
        return RouteRequest(
            model=self._model,
            prompt_tokens=len(prompt),
            max_tokens=self._max_tokens - len(self._written(numbers)),
            choices=len(numbers),
            cached=self._registry.prefix_index.lookup(prompt, epochs, self.salt),
            avoid=avoid,
            scored_tokens=self.prompt_logprobs.scored_tokens,
            structured=self._request.format is not None,
        )

    def decode_request(self, numbers: Numbers, timeout_s: float, context: str | None) -> DecodeRequest:
        written = self._written(numbers)
        params = self._params | {"max_tokens": self._max_tokens - len(written)} | self.prompt_logprobs.params()
        if len(numbers) < self._request.n:
            params |= {"n": 1, "choice": numbers[0]}
        first = not any(state.written for state in self.choice_states)
        return DecodeRequest(
            tokens=self._tokens + written,
            written=tuple(written),
            context=context,
            stream=True,
            progress=self._request.progress and first,
            timeout_s=timeout_s,
            cache_salt=self.salt.value,
            shared_tokens=self.salt.shared_tokens,
            **params,
        )

    def stream_check(self, numbers: Numbers, request: DecodeRequest, model: ModelInfo | None) -> StreamCheck:
        text = "".join(self.choice_states[numbers[0]].text) if len(numbers) == 1 else ""
        tokenizer = self._tokenizer  # only the node's own can tell what text its tokens are
        is_same = tokenizer is not None and model is not None and tokenizer.text_identity == model.text_identity
        return TokenStreamCheck(request, model, tokenizer if is_same else None, text)

    def explain(self, route: Route, reason: str) -> str:
        return reason

    def is_output(self, event: StreamEvent) -> bool:
        return event.token is not None

    def warning(self, numbers: Numbers) -> str | None:
        return None

    def refused(self, error: NodeRefused, numbers: Numbers, cause: str) -> Exception:
        return error

    def finished(self, attempt: Attempt, numbers: Numbers, prompt: list[int]) -> None:
        nodes, index = self._registry.nodes, self._registry.prefix_index
        decode, written = nodes[attempt.route.decode], self.choice_states[numbers[0]].written
        index.add(decode.name, decode.epoch, [*self._tokens, *written], self.salt)
        if attempt.route.prefill:
            index.add(attempt.route.prefill, nodes[attempt.route.prefill].epoch, prompt, self.salt)

    def can_continue(self) -> bool:
        return True


def with_seed(request: GenerateRequest, seed: int) -> GenerateRequest:
    """A sampled answer needs a seed, or another node could not continue it."""
    if not request.temperature or request.seed is not None:
        return request
    return msgspec.structs.replace(request, seed=seed)
