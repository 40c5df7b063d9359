"""From a checked request to what nodes get: the prompt's tokens, or its text where nodes take text."""

import asyncio
import time
from datetime import date

import msgspec

from disaggregated_inference.api import GenerateRequest
from disaggregated_inference.cluster import ClusterConfig
from disaggregated_inference.defaults import MAX_TOKENS
from disaggregated_inference.errors import ContextTooLong, DisaggError
from disaggregated_inference.models import ModelTokenizer
from disaggregated_inference.orchestrator.continuation import Continuation, TokenContinuation
from disaggregated_inference.orchestrator.node_state import NodeState
from disaggregated_inference.orchestrator.recorder import RequestRecorder
from disaggregated_inference.orchestrator.registry import NodeRegistry
from disaggregated_inference.orchestrator.shared_prompts import SharedPrompts
from disaggregated_inference.orchestrator.text_continuation import TextContinuation, estimated_tokens
from disaggregated_inference.orchestrator.tokenizer_cache import TokenizerCache
from disaggregated_inference.timeouts import OrchestratorTimeouts


class InputProcessor:
    """Tokenizes once: from here on all nodes get token ids."""

    def __init__(self, config: ClusterConfig, timeouts: OrchestratorTimeouts) -> None:
        self._config, self._poll_s = config, timeouts.poll_s
        self.tokenizers = TokenizerCache(fetch_s=timeouts.tokenizer_s)
        models = {name: config.options_of(name).shared_prompts for name in config.names}
        self._shared_prompts = {name: SharedPrompts(texts) for name, texts in models.items() if texts}

    async def process(
        self, request: GenerateRequest, recorder: RequestRecorder, registry: NodeRegistry, deadline: float
    ) -> tuple[GenerateRequest, Continuation]:
        """By text or by tokens, as the model's nodes take it; with a limit of tokens."""
        model, nodes = recorder.model, registry.of(recorder.model)
        window = self._window(model, nodes)
        if any(node.takes_text for node in nodes):
            request = _limited(request, window - estimated_tokens(request))
            return request, TextContinuation(registry, model, request, recorder)
        began_at = time.perf_counter()
        tokenizer = await self._tokenizer_of(request, nodes, deadline)
        if (tokens := request.tokens) is None:
            assert tokenizer
            tokens = await self.tokenizers.encode(tokenizer, request, window)
        recorder.prompt_tokens = len(tokens)
        recorder.phase("tokenize", began_at)
        wanted = len(tokens) + (request.max_tokens or 1)
        if wanted > window:
            raise ContextTooLong(wanted, window, prompt_tokens=len(tokens))
        request = _limited(request, window - len(tokens))
        shared = self._shared_tokens(request, model, tokens, tokenizer)
        return request, TokenContinuation(registry, model, request, tokens, tokenizer, shared)

    async def _tokenizer_of(
        self, request: GenerateRequest, nodes: list[NodeState], deadline: float
    ) -> ModelTokenizer | None:
        """A request by tokens needs it only to check the text of the answer. Others wait for a node that has it."""
        while True:
            try:
                return await self.tokenizers.tokenizer(nodes)
            except DisaggError:
                if request.tokens is not None:
                    return None
                may_come = any(node.may_come_back and not node.reachable for node in nodes)
                if not may_come or time.monotonic() > deadline - 2 * self._poll_s:
                    raise
            await asyncio.sleep(self._poll_s)

    def _shared_tokens(
        self, request: GenerateRequest, model: str, tokens: list[int], tokenizer: ModelTokenizer | None
    ) -> int:
        """Leading tokens that callers share although they have different salts."""
        prompts = self._shared_prompts.get(model)
        if prompts is None or tokenizer is None or not request.cache_salt:
            return 0
        return prompts.tokens_in(tokens, tokenizer, date.today())

    def _window(self, model: str, nodes: list[NodeState]) -> int:
        known = [node.info.context_window for node in nodes if node.info and not node.mismatch]
        return self._config.options_of(model).context_window or max(known, default=1 << 30)


def _limited(request: GenerateRequest, fits: int) -> GenerateRequest:
    """A request without a limit gets the usual one, or what fits."""
    if request.max_tokens is not None:
        return request
    return msgspec.structs.replace(request, max_tokens=max(1, min(MAX_TOKENS, fits)))
