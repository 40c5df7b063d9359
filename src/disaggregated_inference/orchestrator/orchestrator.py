"""The orchestrator: usable by itself, with no daemon. Everything here runs on one event loop."""

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Unpack

import aiohttp
import msgspec

from disaggregated_inference.api import (
    ClusterStatus,
    Completion,
    Delta,
    ErrorDetail,
    GenerateOptions,
    GenerateRequest,
    MergedCompletions,
    PromptLogprob,
    Rates,
    RequestOptions,
    RequestRecord,
    generate_request,
    named_options,
    new_seed,
    options_of,
)
from disaggregated_inference.cluster import ClusterConfig, load_config
from disaggregated_inference.errors import ClusterError, DeadlineExceeded, DisaggError
from disaggregated_inference.identity import Identity, open_identity
from disaggregated_inference.models import ModelTokenizer
from disaggregated_inference.orchestrator.connections import NodeConnector
from disaggregated_inference.orchestrator.continuation import with_seed
from disaggregated_inference.orchestrator.defaults import require_defaults
from disaggregated_inference.orchestrator.history import History
from disaggregated_inference.orchestrator.input_processor import InputProcessor
from disaggregated_inference.orchestrator.leg_errors import NodeRefused
from disaggregated_inference.orchestrator.node_state import NodeState
from disaggregated_inference.orchestrator.outcomes import Outcomes, outcome_of
from disaggregated_inference.orchestrator.output_queue import OutputQueue
from disaggregated_inference.orchestrator.recorder import OnPlan, RequestRecorder
from disaggregated_inference.orchestrator.registry import NodeRegistry
from disaggregated_inference.orchestrator.request_queue import RequestQueue
from disaggregated_inference.orchestrator.runner import Put, RequestRunner
from disaggregated_inference.orchestrator.status_report import health_report, status_report
from disaggregated_inference.orchestrator.threads import in_thread
from disaggregated_inference.orchestrator.unavailable_nodes import no_decode_node
from disaggregated_inference.orchestrator.verdict import model_verdict
from disaggregated_inference.struct_types import build_struct_types
from disaggregated_inference.timeouts import OrchestratorTimeouts

_TIMEOUT_REMEDY = "ask for less, or give more time: timeout, or the config's prefill_timeout_s and decode_timeout_s"
_PLACES = 64  # of a model whose nodes have not answered yet
_PLACES_PER_SLOT = 2  # so that a node has the next request there when a slot is free


class DisaggregatedInference:
    """`config`: a dict, a path, a `ClusterConfig`, or None for the file that is found. Starts with its first request or
    `async with`; `aclose` ends all running requests."""

    def __init__(
        self,
        config: "ClusterConfig | dict[str, Any] | str | Path | None" = None,
        timeouts: OrchestratorTimeouts = OrchestratorTimeouts(),
    ) -> None:
        build_struct_types()
        self.config = config if isinstance(config, ClusterConfig) else load_config(config)
        for name in self.config.names:
            require_defaults(self.config, name)
        self._timeouts = timeouts
        policies = self.config.policies
        self._outcomes = Outcomes(policies, timeouts.history)
        self._was_replaced = False
        self.queue = RequestQueue(policies.queue, _PLACES, timeouts=timeouts)
        self._inputs = InputProcessor(self.config, timeouts)
        self._registry: NodeRegistry | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._identity: Identity | None = None
        self._running: set[asyncio.Task[Any]] = set()
        self._servers = {server.name: server for server in self.config.servers}

    async def __aenter__(self) -> "DisaggregatedInference":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def start(self) -> NodeRegistry:
        self._require_open()
        if self._registry is None:
            self._loop = asyncio.get_running_loop()
            keep_s, self._identity = self._timeouts.idle_connection_s, open_identity(self.config.identity, environ={})
            tls: ssl.SSLContext | bool = self._identity.watch().client_context if self._identity else True
            connector = NodeConnector(limit=0, keepalive_timeout=keep_s, ssl=tls)
            cookies = aiohttp.DummyCookieJar()  # nodes set none
            session = aiohttp.ClientSession(connector=connector, cookie_jar=cookies, auto_decompress=False)
            self._registry = NodeRegistry(self.config, session, self._timeouts)  # which closes it
            self._registry.start()
        return self._registry

    def _require_open(self) -> None:
        if self._closed:
            raise ClusterError("this DisaggregatedInference was closed; make a new one")
        if self._loop not in (None, asyncio.get_running_loop()):
            raise ClusterError("this DisaggregatedInference belongs to another event loop; make one for each")

    async def aclose(self) -> None:
        """Takes no new requests and ends the running ones. A second call is harmless."""
        self._closed = True
        if self._registry is None:
            return
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for node in self._registry.nodes.values():
            await node.client.flush()
        await self._registry.close()
        self._registry = None
        if self._identity:
            self._identity.close()
        if not self._was_replaced:
            await in_thread(self.history.close)

    @property
    def history(self) -> History:
        return self._outcomes.history

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one request ran."""
        return self._outcomes.busy.seconds

    @property
    def on_end(self) -> list[Callable[[RequestRecord], None]]:
        """Called with the record of every request that ended."""
        return self._outcomes.on_end

    def replace(self, old: "DisaggregatedInference") -> History:
        """Adopt `old`'s outcomes, before the first request here; requests that still run there count here too. The
        caller closes the returned history."""
        own, self._outcomes, old._was_replaced = self._outcomes, old._outcomes, True
        return self._outcomes.move_history(own)

    async def idle(self) -> None:
        """Wait until no request runs."""
        while self._running:
            await asyncio.wait(set(self._running))

    @named_options
    async def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> dict[str, Any]:
        """The whole answer as a dict: `response`, the metrics beside it, and `choices` if there are several."""
        completion = await self.complete(prompt, **options)
        return completion.answer()

    @named_options
    async def complete(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Completion:
        """The whole answer, typed."""
        request, recorder = self._prepare({"prompt": prompt, **options})
        prompt_logprobs: list[PromptLogprob] = []
        recorder.on_prompt_logprobs = lambda piece: prompt_logprobs.extend(piece.tokens)
        record = await _result(self._start(request, recorder, None))
        return Completion(choices=recorder.choices(), record=record, prompt_logprobs=tuple(prompt_logprobs))

    @named_options
    async def stream(
        self, prompt: str | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Delta, None]:
        """The answer while it is generated; closing the iterator cancels the request on both nodes."""
        async with aclosing(self.batches({"prompt": prompt, **options})) as batches:
            async for deltas in batches:
                for delta in deltas:
                    yield delta

    async def batches(
        self, options: RequestOptions, on_plan: OnPlan | None = None
    ) -> AsyncGenerator[list[Delta], None]:
        """The same, with all deltas that have arrived at a time, so that a relay writes them in one go."""
        request, recorder = self._prepare(options, on_plan)
        queue = OutputQueue()
        recorder.on_progress = lambda progress: queue.put([Delta(progress=progress)])
        recorder.on_prompt_logprobs = lambda piece: queue.put([Delta(prompt_logprobs=piece)])
        recorder.on_waiting = lambda reason: queue.put([Delta(waiting=reason)])
        task = self._start(request, recorder, queue.put)
        task.add_done_callback(queue.close)
        try:
            while deltas := await queue.take():
                yield deltas
            record = await _result(task)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
            del task  # it has the error, whose traceback holds this frame
        yield [Delta(completion=Completion(choices=recorder.choices(), record=record))]

    async def generate_many(self, requests: Sequence[RequestOptions | Mapping[str, Any]]) -> dict[str, Any]:
        """All requests at once, in one merged result. A request that fails has `error` in its place."""
        completions = await self.complete_many(requests)
        return completions.answer()

    async def complete_many(self, requests: Sequence[RequestOptions | Mapping[str, Any]]) -> MergedCompletions:
        """The same, typed."""
        started = time.perf_counter()
        results = await asyncio.gather(*(self._one_of_many(request) for request in requests))
        return MergedCompletions(results=tuple(results), wall_time=time.perf_counter() - started)

    async def _one_of_many(self, request: RequestOptions | Mapping[str, Any]) -> Completion | ErrorDetail:
        try:
            return await self.complete(**options_of(request))
        except Exception as error:  # the other requests go on
            return ErrorDetail(error.code if isinstance(error, DisaggError) else "internal_error", str(error))

    async def health(self) -> dict[str, Any]:
        """Polls every node now."""
        registry = await self.start()
        await registry.refresh()
        self._require_open()  # a closed session reaches no node
        return health_report(registry)

    async def status(self) -> dict[str, Any]:
        """What is known, without polling; see `health`."""
        status: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(await self.cluster_status()))
        return status

    async def cluster_status(self) -> ClusterStatus:
        """The same, typed."""
        return status_report(await self.start(), self.queue, self._outcomes)

    async def require_decode_node(self, model: str) -> None:
        """Raises NoDecodeNode if the model's nodes cannot serve now."""
        nodes = (await self.start()).of(model)
        if not model_verdict(nodes).serves:
            raise no_decode_node(model, nodes)

    async def tokenizer(self, model: str | None = None) -> ModelTokenizer:
        """The tokenizer that a model's nodes use."""
        registry, name = await self.start(), self.config.resolve_model(model)
        await registry.wait_for_status(name)
        return await self._inputs.tokenizers.tokenizer(registry.of(name))

    def _prepare(
        self, options: RequestOptions, on_plan: OnPlan | None = None
    ) -> tuple[GenerateRequest, RequestRecorder]:
        """Checks the request. Raises BadRequest before a node is contacted."""
        model = self.config.resolve_model(options.get("model") or options.get("model_type"))
        asked = generate_request(options, self.config.options_of(model).defaults)
        request = with_seed(asked, new_seed())
        operation = "text_completion" if request.messages is None else "chat"
        recorder = RequestRecorder(request.request_id, model, operation, caller=request.caller)
        recorder.on_plan = on_plan or recorder.on_plan
        recorder.keeps_seed = bool(asked.temperature) and asked.seed is not None
        return request, recorder

    def _start(
        self, request: GenerateRequest, recorder: RequestRecorder, put: Put | None
    ) -> "asyncio.Task[RequestRecord]":
        """In a task of its own: its timeout must not end the caller's work, nor a slow reader hold its place."""
        task = asyncio.create_task(self._run(request, recorder, put))
        self._outcomes.busy.began()
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda _: self._outcomes.busy.ended())
        return task

    async def _run(self, request: GenerateRequest, recorder: RequestRecorder, put: Put | None) -> RequestRecord:
        """From the queue to the last token. Every outcome is in the history."""
        error: BaseException | None = None
        timeout_s = request.timeout or self._timeout_s(recorder.model)
        deadline = time.monotonic() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._serve(request, recorder, put, deadline)
        except BaseException as caught:
            error = caught
            if isinstance(caught, TimeoutError) or _is_late(caught, deadline - self._timeouts.node_clock_s):
                error = DeadlineExceeded(f"not done within {timeout_s:g} s: {_TIMEOUT_REMEDY}")
                raise error from None
            raise
        finally:
            record = self._finish(recorder, error)
            del error  # its traceback holds this frame, and so all that the request had
        return record

    async def _serve(
        self, request: GenerateRequest, recorder: RequestRecorder, put: Put | None, deadline: float
    ) -> None:
        registry, began_at = await self.start(), time.perf_counter()
        await registry.wait_for_status(recorder.model)
        self.queue.allow(recorder.model, _places(registry.of(recorder.model)))
        async with self.queue.turn(recorder.model, request.priority, deadline, request.caller):
            recorder.phase("queue", began_at)
            request, continuation = await self._inputs.process(request, recorder, registry, deadline)
            await RequestRunner(registry, request, continuation, recorder, deadline).run(put)

    def _timeout_s(self, model: str) -> float:
        policies, options = self.config.policies, self.config.options_of(model)
        prefill_s = options.prefill_timeout_s or policies.prefill_timeout_s
        return prefill_s + (options.decode_timeout_s or policies.decode_timeout_s)

    def _finish(self, recorder: RequestRecorder, error: BaseException | None) -> RequestRecord:
        outcome = outcome_of(error)
        detail = ErrorDetail(getattr(error, "code", outcome), str(error)) if error else None
        nodes = self._registry.nodes if self._registry else {}
        power = {name: node.power for name, node in nodes.items()}
        record = recorder.finish(self._servers, self.config.policies, outcome, detail, power, self._rates_of)
        return self._outcomes.keep(record)

    def _rates_of(self, name: str) -> Rates:
        """That a node measured."""
        node = self._registry.nodes.get(name) if self._registry else None
        return node.status.rates if node and node.status else Rates()


def _is_late(error: BaseException, after: float) -> bool:
    """Whether a node noticed first that the request's time is over."""
    late = isinstance(error, NodeRefused) and error.status == DeadlineExceeded.status
    return late and time.monotonic() > after


async def _result(task: "asyncio.Task[RequestRecord]") -> RequestRecord:
    """A caller that is cancelled cancels the request. If the orchestrator was closed meanwhile, that is the error."""
    try:
        if not task.done():
            await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})
        raise
    if task.cancelled():
        raise ClusterError("shutting down: the request was not done by then, and was ended; send it again")
    try:
        return task.result()
    finally:
        del task  # it has the error, whose traceback holds this frame


def _places(nodes: list[NodeState]) -> int:
    """Requests of a model that may run at once: as many as its decode nodes have slots, and some that wait there. A
    node where requests wait for memory takes no more than it has now: the others wait here, where priorities count."""
    slots = [
        max(1, node.status.slots.used) if node.status.queue.waiting else node.status.slots.most
        for node in nodes
        if node.usable and node.status and node.role != "prefill"
    ]
    return _PLACES_PER_SLOT * sum(slots) or _PLACES
