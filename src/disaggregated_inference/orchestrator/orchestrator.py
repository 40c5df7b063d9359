"""The orchestrator: usable by itself, with no daemon. Everything here runs on one event loop."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from disaggregated_inference.cluster.config import ClusterConfig, load_config
from disaggregated_inference.errors import ClusterError, ContextTooLong, DeadlineExceeded, DisaggError
from disaggregated_inference.models.tokenizer import ModelTokenizer
from disaggregated_inference.orchestrator.cluster_view import Route
from disaggregated_inference.orchestrator.history import History
from disaggregated_inference.orchestrator.node_client import Delta, NodeRefused, TokenEvent
from disaggregated_inference.orchestrator.node_state import NodeState
from disaggregated_inference.orchestrator.output_queue import OutputQueue
from disaggregated_inference.orchestrator.recorder import RequestRecorder
from disaggregated_inference.orchestrator.registry import NodeRegistry
from disaggregated_inference.orchestrator.request import GenerateRequest, asked, options_in, require_defaults
from disaggregated_inference.orchestrator.request_queue import RequestQueue
from disaggregated_inference.orchestrator.runner import RequestRunner
from disaggregated_inference.orchestrator.text_runner import TextRequestRunner, about_tokens
from disaggregated_inference.orchestrator.threads import in_thread
from disaggregated_inference.orchestrator.tokenizer_cache import TokenizerCache

_FIRST_NEWS_S = 3.0
_IDLE_S = 2.0  # connections are kept for less long than nodes keep theirs: a request never goes into a closing one
_MAX_TOKENS = 2000
_MORE_TIME = "ask for less, or give more time: timeout, or the config's prefill_timeout_s and decode_timeout_s"
_NOTICED_EARLY_S = 0.1
_PLACES = 64  # of a model whose nodes are not known yet
_AHEAD = 2  # requests per slot: nodes have the next one there when a slot is free


class Past:
    """What became of requests: of an orchestrator's, and of those whose place it took."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.served = {"ok": 0, "failed": 0, "refused": 0, "cancelled": 0}
        self.on_end: list[Callable[[dict[str, Any]], None]] = []


class DisaggregatedInference:
    """`config`: a dict, a path, a `ClusterConfig`, or None for the file that is found. Starts with its first request or
    `async with`; `aclose` ends everything that is under way."""

    def __init__(self, config: "ClusterConfig | dict[str, Any] | str | Path | None" = None) -> None:
        self.config = config if isinstance(config, ClusterConfig) else load_config(config)
        for name in self.config.names:
            require_defaults(self.config, name)
        self._past = Past(History(self.config.policies.history, self.config.policies.history_file))
        self._has_heir = False
        self.line = RequestQueue(self.config.policies.queue, _PLACES)
        self._tokenizers = TokenizerCache()
        self._registry: NodeRegistry | None = None
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._under_way: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> "DisaggregatedInference":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def start(self) -> NodeRegistry:
        self._require_open()
        if self._registry is None:
            self._loop = asyncio.get_running_loop()
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S)
            self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
            self._registry = NodeRegistry(self.config, self._session)
            self._registry.start()
        return self._registry

    def _require_open(self) -> None:
        if self._closed:
            raise ClusterError("this DisaggregatedInference was closed; make a new one")
        if self._loop not in (None, asyncio.get_running_loop()):
            raise ClusterError("this DisaggregatedInference belongs to another event loop; make one for each")

    async def aclose(self) -> None:
        """Nothing new from now on; what is under way ends. Again is harmless."""
        self._closed = True
        if self._registry is None:
            return
        for task in list(self._under_way):
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)
        for node in self._registry.nodes.values():
            await node.client.told()
        await self._registry.close()
        assert self._session
        await self._session.close()
        self._registry = self._session = None
        if not self._has_heir:
            await in_thread(self.history.close)

    @property
    def history(self) -> History:
        return self._past.history

    @property
    def on_end(self) -> list[Callable[[dict[str, Any]], None]]:
        """Told of every request that ended."""
        return self._past.on_end

    def inherit(self, old: "DisaggregatedInference") -> History:
        """Take another one's place, before the first request: what became of its requests is known here too, and what
        will become of those that it has. The history that nobody needs any more is the caller's to close."""
        policies, before = self.config.policies, old.config.policies
        own, self._past, old._has_heir = self.history, old._past, True
        if (policies.history, policies.history_file) != (before.history, before.history_file):
            own.inherit(self._past.history)
            own, self._past.history = self._past.history, own
        return own

    async def idle(self) -> None:
        """Until nothing is under way."""
        while self._under_way:
            await asyncio.wait(set(self._under_way))

    async def generate(self, prompt: str | None = None, **options: Any) -> dict[str, Any]:
        """The whole answer: `response`, the metrics beside it, and `choices` where there are several."""
        ask, record = self._asked(prompt=prompt, **options)
        await _finished(self._begun(ask, record, lambda events: None))
        return record.answer

    async def stream(self, prompt: str | None = None, **options: Any) -> AsyncGenerator[Delta, None]:
        """The answer while it is written; closing the iterator cancels it on both nodes."""
        async with aclosing(self.batches(prompt, **options)) as batches:
            async for deltas in batches:
                for delta in deltas:
                    yield delta

    async def batches(self, prompt: str | None = None, **options: Any) -> AsyncGenerator[list[Delta], None]:
        """The same, each time with all that has come: whoever passes it on has the work of doing so only once."""
        ask, record = self._asked(prompt=prompt, **options)
        inbox = OutputQueue()
        record.on_progress = lambda progress: inbox.put([Delta(progress=progress)])
        task = self._begun(ask, record, inbox.put)
        task.add_done_callback(inbox.close)
        try:
            while deltas := await inbox.take():
                yield deltas
            await _finished(task)
        finally:
            task.cancel()
            await asyncio.wait({task})
        yield [Delta(metrics=record.answer)]

    async def generate_many(self, requests: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """All at once, in one merged result. One that fails has `error` in its place; the others go on."""
        started = time.perf_counter()
        results = await asyncio.gather(*(self._one_of_many(request) for request in requests))
        return merged(results, time.perf_counter() - started)

    async def _one_of_many(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return await self.generate(**options_in(request))
        except Exception as error:  # the others go on, whatever it was
            code = error.code if isinstance(error, DisaggError) else "internal_error"
            return {"response": None, "error": {"code": code, "message": str(error)}}

    async def health(self) -> dict[str, Any]:
        """Asks every node now."""
        registry = await self.start()
        await registry.look()
        self._require_open()  # or nobody could be reached because of that
        nodes = [node.shown() for node in registry.nodes.values()]
        return {
            "verdict": verdict(list(registry.nodes.values())),
            "nodes": {node["name"]: _brief(node) for node in nodes},
        }

    async def status(self) -> dict[str, Any]:
        """What is known, without asking anyone; see `health`."""
        registry = await self.start()
        return {
            "verdict": verdict(list(registry.nodes.values())),
            "models": {model: verdict(registry.of(model)) for model in self.config.names},
            "nodes": [node.shown() for node in registry.nodes.values()],
            "links": [
                {"prefill": p, "decode": d, "bytes_per_s": speed}
                for model in self.config.names
                for (p, d), speed in registry.view(model).links.items()
            ],
            "refusals": [refusal for model in self.config.names for refusal in registry.refusals(model)],
            "queue": msgspec.to_builtins(self.line.seen()),
            "served": dict(self._past.served),
            "latency": {"total_time": self.history.percentiles("total_time")},
        }

    async def tokenizer(self, model: str | None = None) -> ModelTokenizer:
        """Of a model, as its nodes have it."""
        registry, name = await self.start(), self.config.resolve_model(model)
        await registry.heard_of(name, _FIRST_NEWS_S)
        return await self._tokenizers.tokenizer(registry.of(name))

    def _asked(
        self, on_plan: Callable[[Route, str], None] | None = None, **options: Any
    ) -> tuple[GenerateRequest, RequestRecorder]:
        model = self.config.resolve_model(options.get("model") or options.get("model_type"))
        ask = asked(self.config.options_of(model).defaults, **options)
        record = RequestRecorder(ask.request_id, model)
        record.operation = "text_completion" if ask.messages is None else "chat"
        record.on_plan = on_plan or record.on_plan
        return ask, record

    def _begun(
        self, ask: GenerateRequest, record: RequestRecorder, put: Callable[[list[TokenEvent]], None]
    ) -> "asyncio.Task[None]":
        """In a task of its own: its time-out must not end the caller's work, nor a slow reader hold its places."""
        task = asyncio.create_task(self._run(ask, record, put))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task

    async def _run(
        self, ask: GenerateRequest, record: RequestRecorder, put: Callable[[list[TokenEvent]], None]
    ) -> None:
        """From the queue to the last token. Whatever ends it is in the history."""
        error: BaseException | None = None
        timeout_s = ask.timeout or self._timeout_s(record.model)
        deadline = time.monotonic() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._serve(ask, record, put, deadline)
        except BaseException as caught:
            error = caught
            if isinstance(caught, TimeoutError) or _is_late(caught, deadline):
                error = DeadlineExceeded(f"not done within {timeout_s:g} s: {_MORE_TIME}")
                raise error from None
            raise
        finally:
            self._ended(record, error)

    async def _serve(
        self, ask: GenerateRequest, record: RequestRecorder, put: Callable[[list[TokenEvent]], None], deadline: float
    ) -> None:
        registry, began_at = await self.start(), time.perf_counter()
        await registry.heard_of(record.model, _FIRST_NEWS_S)
        self.line.allow(record.model, _places(registry.of(record.model)))
        async with self.line.turn(record.model, ask.priority, deadline):
            record.phase("queue", began_at)
            life = await self._life(ask, record, registry, deadline)
            await life.run(put)

    async def _life(
        self, ask: GenerateRequest, record: RequestRecorder, registry: NodeRegistry, deadline: float
    ) -> RequestRunner:
        nodes = registry.of(record.model)
        if any(node.takes_text for node in nodes):
            ask = self._limited(ask, about_tokens(ask), nodes, record)
            return TextRequestRunner(registry, ask, record.model, record, deadline)
        tokens = await self._read(ask, record, registry)
        window, wanted = self._window(record.model, nodes), len(tokens) + (ask.max_tokens or 1)
        if wanted > window:
            raise ContextTooLong(wanted, window, prompt_tokens=len(tokens))
        return RequestRunner(
            registry, self._limited(ask, len(tokens), nodes, record), record.model, tokens, record, deadline
        )

    def _limited(
        self, ask: GenerateRequest, prompt_tokens: int, nodes: list[NodeState], record: RequestRecorder
    ) -> GenerateRequest:
        """Where nobody said how long the answer may be: as much as usual, or as fits."""
        if ask.max_tokens is not None:
            return ask
        fits = self._window(record.model, nodes) - prompt_tokens
        return msgspec.structs.replace(ask, max_tokens=max(1, min(_MAX_TOKENS, fits)))

    def _timeout_s(self, model: str) -> float:
        policies, options = self.config.policies, self.config.options_of(model)
        prefill_s = options.prefill_timeout_s or policies.prefill_timeout_s
        return prefill_s + (options.decode_timeout_s or policies.decode_timeout_s)

    async def _read(self, ask: GenerateRequest, record: RequestRecorder, registry: NodeRegistry) -> list[int]:
        """The prompt's tokens."""
        began_at, nodes = time.perf_counter(), registry.of(record.model)
        window = self._window(record.model, nodes)
        tokens = ask.tokens if ask.tokens is not None else await self._tokenized(ask, nodes, window)
        record.prompt_tokens = len(tokens)
        record.phase("tokenize", began_at)
        return tokens

    async def _tokenized(self, ask: GenerateRequest, nodes: list[NodeState], window: int) -> list[int]:
        tokenizer = await self._tokenizers.tokenizer(nodes)
        return await self._tokenizers.to_tokens(tokenizer, ask, window)

    def _window(self, model: str, nodes: list[NodeState]) -> int:
        known = [node.about.context_window for node in nodes if node.about and not node.mismatch]
        return self.config.options_of(model).context_window or max(known, default=1 << 30)

    def _ended(self, record: RequestRecorder, error: BaseException | None) -> None:
        record.end()
        servers = {server.name: server for server in self.config.servers}
        metrics = record.metrics(servers, self.config.policies)
        record.answer = record.told() | metrics
        outcome = _outcome(error)
        self._past.served[outcome] += 1
        said = {"error": {"code": getattr(error, "code", outcome), "message": str(error)}} if error else {}
        ended = metrics | said | {"ok": error is None, "outcome": outcome, "time": record.time}
        ended["finish_reason"] = record.answer.get("finish_reason")
        ended |= {"operation": record.operation, "n": len(record.choice_states)}
        self.history.add(ended)
        for tell in self.on_end:
            tell(ended)


def _is_late(error: BaseException, deadline: float) -> bool:
    """Whether a node noticed first that the request's time is over."""
    late = isinstance(error, NodeRefused) and error.status == DeadlineExceeded.status
    return late and time.monotonic() > deadline - _NOTICED_EARLY_S


def _outcome(error: BaseException | None) -> str:
    """What is the request's own fault, and would be so everywhere, is refused: nothing failed."""
    if error is None:
        return "ok"
    if not isinstance(error, Exception):
        return "cancelled"
    return "refused" if 400 <= getattr(error, "status", 500) < 500 else "failed"


async def _finished(task: "asyncio.Task[None]") -> None:
    """Whoever waits and is cancelled cancels it; that the orchestrator was closed meanwhile is an error, said so."""
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})
        raise
    if task.cancelled():
        raise ClusterError("shutting down: the request was not done by then, and was ended; ask again")
    task.result()


def _places(nodes: list[NodeState]) -> int:
    """Requests of a model under way at once: as many as its decode nodes take, and some that wait there. A node where
    requests wait for memory takes no more than it has now: the others wait here, where priorities count."""
    takes = [
        max(1, node.status.slots.used) if node.status.queue.waiting else node.status.slots.most
        for node in nodes
        if node.usable and node.status and node.role != "prefill"
    ]
    return _AHEAD * sum(takes) or _PLACES


def _brief(node: dict[str, Any]) -> dict[str, Any]:
    return {name: node[name] for name in ("state", "why", "role", "model", "engine", "url", "usable")}


def verdict(nodes: list[NodeState]) -> str:
    """One of five for each model; where they differ, which has which."""
    models = dict.fromkeys(node.model for node in nodes)
    found = {model: _verdict([node for node in nodes if node.model == model]) for model in models}
    said = set(found.values())
    return said.pop() if len(said) == 1 else "; ".join(f"{model}: {each}" for model, each in found.items())


VERDICTS = (
    "all up",
    "a node is down, others serve",
    "prefill down: decode-only",
    "decode down: cannot serve",
    "nothing is up",
)


def _verdict(nodes: list[NodeState]) -> str:
    readers = [node.serves for node in nodes if node.role != "decode"]
    writers = [node.serves for node in nodes if node.role != "prefill"]
    if all(readers + writers):
        return VERDICTS[0]
    if not any(readers + writers):
        return VERDICTS[4]
    if not any(writers):
        return VERDICTS[3]
    return VERDICTS[1] if any(readers) or not readers else VERDICTS[2]


def merged(results: Sequence[dict[str, Any]], wall_s: float) -> dict[str, Any]:
    """Of requests that ran at once: what they would have taken one after the other, over what they took."""
    one_by_one_s = sum(result.get("total_time") or 0.0 for result in results)
    tokens = sum(result.get("completion_tokens") or 0 for result in results)
    return {
        "results": list(results),
        "wall_time": wall_s,
        "sequential_time": one_by_one_s,
        "speedup": one_by_one_s / wall_s if wall_s else 0.0,
        "completion_tokens": tokens,
        "total_tokens": sum(result.get("total_tokens") or 0 for result in results),
        "tokens_per_sec": tokens / wall_s if wall_s else 0.0,
        "errors": sum("error" in result for result in results),
    }
