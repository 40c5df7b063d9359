"""The decode node: gets the KV of a prompt and generates the completion.

A request first waits until admission has reserved KV memory for its prompt and its whole completion. Then its KV comes
from this node's prefix cache, from a prefill node, from the request itself or from this node's engine. The first token
is sampled from the prompt's logits, and the request joins the decode batch.
"""

import secrets
import time
from collections.abc import Callable
from functools import partial

from disaggregated_inference.api import DEFAULT_NODE_TOKENS, DecodeMetrics, GenerationParams
from disaggregated_inference.engines import Engine
from disaggregated_inference.errors import BadRequest, ContextTooLong
from disaggregated_inference.kv_transfer import InlineReader, cancel_ticket, renew_lease
from disaggregated_inference.models import ModelTokenizer
from disaggregated_inference.node.context import PrefillContext, prompt_hash
from disaggregated_inference.node.decode_runner import DecodeRunner
from disaggregated_inference.node.decode_task import DecodeTask
from disaggregated_inference.node.generation import Generation, RequestInfo
from disaggregated_inference.node.kv_memory import KVMemory
from disaggregated_inference.node.kv_source import KVSource, as_bad_request
from disaggregated_inference.node.open_tasks import OpenTasks
from disaggregated_inference.node.structured_output import GrammarCompiler
from disaggregated_inference.node.trust import Trust
from disaggregated_inference.timeouts import NodeTimeouts


class DecodeNode:
    """The decode role of a node. `on_end` is called at the end of every request."""

    def __init__(
        self,
        kv_memory: KVMemory,
        tokenizer: ModelTokenizer,
        chunk_tokens: int = 0,
        streams: int = 4,
        codecs: tuple[str, ...] = ("raw",),
        timeouts: NodeTimeouts = NodeTimeouts(),
        trust: Trust = Trust(),
    ) -> None:
        self.trust = trust
        self.kv_memory, self.scheduler, self.timeouts = kv_memory, kv_memory.scheduler, timeouts
        self.epoch = secrets.token_hex(8)
        self.grammars = GrammarCompiler(tokenizer, self.engine.spec.vocabulary, self.engine.spec.eos_tokens)
        chunk = chunk_tokens or self.engine.chunk_tokens
        self.kv_source = KVSource(kv_memory, tokenizer, chunk, streams, codecs, timeouts, trust)
        self.on_end: Callable[[Generation, BaseException | None], None] = lambda generation, error: None
        self.requests = OpenTasks(kv_memory, lambda *ended: self.on_end(*ended), timeouts)
        self._runner = DecodeRunner(kv_memory, self.kv_source, self.requests)

    @property
    def engine(self) -> Engine:
        return self.scheduler.engine

    @property
    def open_requests(self) -> int:
        """Requests that wait, receive KV or run."""
        return len(self.requests)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens that this node's engine has still to compute."""
        return self.requests.waiting_tokens

    def close(self, drain_s: float = 0.0) -> None:
        """Let requests finish for `drain_s` seconds, then cancel them."""
        deadline = time.monotonic() + drain_s
        while self.open_requests and time.monotonic() < deadline:
            time.sleep(self.timeouts.drain_poll_s)
        self.requests.cancel_all()

    def generate_from_kv(
        self,
        context: PrefillContext,
        params: GenerationParams,
        info: RequestInfo = RequestInfo(),
        tokens: list[int] | None = None,
    ) -> Generation:
        """Fetch the prompt's KV from a prefill node. `tokens` is the prompt; without it, the node fetches it too."""
        if tokens:
            self.engine.require_vocabulary(tokens)
        if tokens is not None and prompt_hash(tokens) != context.prompt_hash:
            raise BadRequest("tokens is not the prompt of this context; leave it out, or send the prompt's tokens")
        task = self._new_task(tokens, context.tokens, params, info)
        hello, paths_to = self.kv_source.hello(context, info.id), self.kv_source.paths_to
        task.withdraw = lambda: cancel_ticket(hello, paths_to(context))
        task.renew_lease = lambda: renew_lease(hello, paths_to(context))
        fetch, check_peer = (
            partial(step, context, hello, task) for step in (self.kv_source.fetch, self.kv_source.check_peer)
        )
        return self.requests.admit(task, lambda: self._runner.run_in_thread(task, fetch, check_peer))

    def generate_from_inline_kv(
        self, content: bytes, params: GenerationParams, info: RequestInfo = RequestInfo()
    ) -> Generation:
        """Use KV that the request itself contains."""
        spec = self.engine.spec
        with as_bad_request():
            reader = InlineReader(content, self.engine.fingerprint, spec.layout, spec.vocabulary, spec.context_window)
        task = self._new_task(reader.tokens, len(reader.tokens), params, info)
        task.generation.metrics.kv_bytes = task.extra_bytes = len(content)
        receive = partial(self.kv_source.receive_inline, reader, task)
        return self.requests.admit(task, lambda: self._runner.run_in_thread(task, receive))

    def generate_local(
        self, tokens: list[int], params: GenerationParams, info: RequestInfo = RequestInfo()
    ) -> Generation:
        """Compute the prompt's KV on this node, in chunks between the decode steps of other requests."""
        if not tokens:
            raise BadRequest("the prompt is empty")
        self.engine.require_vocabulary(tokens)
        if params.prompt_logprobs is not None:
            self.engine.require_prompt_logprobs()
        task = self._new_task(tokens, len(tokens), params, info)
        task.waiting_tokens = len(tokens)
        self.kv_memory.prefixes.recall(tokens, params.salt)
        return self.requests.admit(task, lambda: self._runner.run_local(task))

    def _new_task(
        self, prompt: list[int] | None, prompt_tokens: int, params: GenerationParams, info: RequestInfo
    ) -> DecodeTask:
        self.kv_memory.require_open()
        params.require_vocabulary(self.engine.spec.vocabulary)
        capacity = prompt_tokens + (params.max_tokens or DEFAULT_NODE_TOKENS)
        if capacity > self.engine.spec.context_window:
            raise ContextTooLong(capacity, self.engine.spec.context_window, prompt_tokens=prompt_tokens)
        params = params.seeded()
        grammars = [self.grammars.start(params.format) if params.format else None for _ in range(params.n)]
        metrics = DecodeMetrics(prompt_tokens, seed=params.seed if params.temperature else None)
        generation = Generation(params, metrics, info, self.timeouts.progress_s)
        task = DecodeTask(generation, prompt, capacity, grammars)
        if prompt is not None:
            self.kv_source.create_choices(task)
        return task
