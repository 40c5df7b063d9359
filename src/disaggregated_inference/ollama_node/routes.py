"""HTTP in front of an Ollama, with the paths and shapes of every other node. See docs/API.md."""

import asyncio
import logging
import os
import secrets
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, TypeVar

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from disaggregated_inference.errors import (
    BadRequest,
    Cancelled,
    DeadlineExceeded,
    DisaggError,
    NotOffered,
    TicketNotFound,
)
from disaggregated_inference.http.middleware import Bearer, RequestId, describe, request_id
from disaggregated_inference.node.metrics import SECONDS
from disaggregated_inference.node.requests import body_of
from disaggregated_inference.node.routes import no_route
from disaggregated_inference.node.streaming import PULSE_S, error_response, json_response, unless_gone
from disaggregated_inference.ollama_node.node import OllamaGeneration, OllamaNode
from disaggregated_inference.ollama_node.output import TextMetrics, TextPiece, WarmContext
from disaggregated_inference.ollama_node.requests import TextRequest, WarmRequest

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_PATIENCE_S = 1.0  # what is refused within it has a status of its own; a model that is being loaded takes longer
_NO_CACHE = "Ollama holds what was read and cannot hand it over: this context is good for nothing but its counts"


def ollama_app(node: OllamaNode, token: str | None) -> Starlette:
    counts = Counts()
    routes = _shared_routes(node, counts)
    routes += _prefill_routes(node, counts) if node.role != "decode" else []
    routes += _decode_routes(node, counts) if node.role != "prefill" else []

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        preparing = asyncio.create_task(node.keep_ready())
        yield
        preparing.cancel()
        await asyncio.gather(preparing, return_exceptions=True)
        await node.ollama.close()

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, DisaggError)
        about = {"request_id": request_id(request), "path": request.url.path, "code": error.code}
        log.warning("refused: %s", error, extra=about)
        return error_response(error, lambda error: 1)

    guards = [Middleware(RequestId), *([Middleware(Bearer, token=token)] if token else [])]
    handlers: dict[Any, Any] = {DisaggError: refused, 404: no_route, 405: no_route}
    return Starlette(routes=routes, middleware=guards, exception_handlers=handlers, lifespan=lifespan)


def _shared_routes(node: OllamaNode, counts: "Counts") -> list[Route]:
    async def health(request: Request) -> Response:
        await node.look()
        state = node.health()
        return json_response(state, 503 if state["status"] in ("unhealthy", "draining") else 200)

    async def status(request: Request) -> Response:
        await node.look()
        return json_response(node.status())

    async def about_model(request: Request) -> Response:
        await node.look()
        return json_response(node.about_model())

    async def tokenizer(request: Request) -> Response:
        raise NotOffered("an Ollama keeps its tokenizer to itself: send it text")

    async def exposition(request: Request) -> Response:
        return Response(generate_latest(counts.registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def drain(request: Request) -> Response:
        node.draining = True
        response = json_response({"draining": True, "waiting": node.open})
        response.background = BackgroundTask(os.kill, os.getpid(), signal.SIGTERM)
        return response

    async def load(request: Request) -> Response:
        await node.load()
        await node.look()
        return json_response(node.health())

    async def unload(request: Request) -> Response:
        await node.unload()
        await node.look()
        return json_response(node.health())

    return [
        Route("/health", health),
        Route("/status", status),
        Route("/model", about_model),
        Route("/model/tokenizer", tokenizer),
        Route("/metrics", exposition),
        Route("/drain", drain, methods=["POST"]),
        Route("/load", load, methods=["POST"]),
        Route("/unload", unload, methods=["POST"]),
    ]


def _prefill_routes(node: OllamaNode, counts: "Counts") -> list[Route]:
    async def prefill(request: Request) -> Response:
        with counts.failures("prefill"):
            asked = await body_of(request, WarmRequest)
            asked.require_sensible()
            asked.require_possible()
            with node.working():
                metrics = await _unless_gone(request, _timed(node.warm(asked), asked.timeout_s))
        counts.read(metrics)
        context = WarmContext(model=node.ollama.model, prompt_tokens=metrics.prompt_tokens)
        told = {name: value for name, value in msgspec.to_builtins(metrics).items() if name in _TOLD_OF_READING}
        answer = {"context": context.encode(), "ticket": asked.ticket or secrets.token_urlsafe(16), "kv": "none"}
        log.info("prompt read", extra={"request_id": request_id(request)} | told)
        return json_response(answer | {"prompt_tokens": metrics.prompt_tokens, "metrics": told, "note": _NO_CACHE})

    async def cancel(request: Request) -> Response:
        raise TicketNotFound("no such ticket: an Ollama holds no cache for anyone")

    return [
        Route("/prefill", prefill, methods=["POST"]),
        Route("/prefill/{ticket}", cancel, methods=["DELETE"]),
    ]


_TOLD_OF_READING = ("prompt_tokens", "prefill_time", "prefill_speed", "queue_time", "load_time", "total_time")


def _decode_routes(node: OllamaNode, counts: "Counts") -> list[Route]:
    async def decode(request: Request) -> Response:
        with counts.failures("decode"):
            asked = await body_of(request, TextRequest)
            if asked.context is not None:
                WarmContext.require(asked.context)
                if asked.prompt is None and asked.messages is None:
                    raise BadRequest("context: no cache is behind it, an Ollama keeps its own; send the prompt too")
            asked.require_possible()
        return await answered(request, asked)

    async def generate(request: Request) -> Response:
        with counts.failures("decode"):
            asked = await body_of(request, TextRequest)
            if asked.context is not None:
                raise BadRequest("/generate reads the prompt itself; a context is for /decode")
            asked.require_possible()
        return await answered(request, asked)

    async def answered(request: Request, asked: TextRequest) -> Response:
        answer = _Answer(node, asked, counts, request_id(request))
        if asked.stream:
            return await answer.streamed(request)
        return json_response(await _unless_gone(request, answer.document()))

    return [Route("/decode", decode, methods=["POST"]), Route("/generate", generate, methods=["POST"])]


class _Answer:
    """One answer: the pieces as they come, on a task of their own, so that a pulse can be sent where none does."""

    def __init__(self, node: OllamaNode, asked: TextRequest, counts: "Counts", name: str) -> None:
        self._node, self._asked, self._counts, self._id = node, asked, counts, name
        self._writing = OllamaGeneration(node, asked)
        self._queue: asyncio.Queue[TextPiece | Exception | None] = asyncio.Queue()

    async def document(self) -> dict[str, Any]:
        pieces = [piece async for piece in self._pieces()]
        document: dict[str, Any] = {"generated_text": "".join(piece.text for piece in pieces), "tokens": None}
        if thinking := "".join(piece.thinking for piece in pieces):
            document["thinking"] = thinking
        if calls := [call for piece in pieces for call in piece.tool_calls]:
            document["tool_calls"] = calls
        return document | {"finish_reason": pieces[-1].finish_reason} | self._summary()

    async def streamed(self, request: Request) -> Response:
        pumping = asyncio.create_task(self._pump())
        try:
            first = await _unless_gone(request, self._some(_PATIENCE_S))
            if first and isinstance(first[0], Exception):
                raise first[0]
        except BaseException:
            pumping.cancel()
            raise
        return StreamingResponse(self._events(first, pumping), media_type="text/event-stream")

    async def _pieces(self) -> AsyncGenerator[TextPiece, None]:
        with self._counts.failures("decode"), self._node.working():
            try:
                async with asyncio.timeout(self._asked.timeout_s), aclosing(self._writing.pieces()) as pieces:
                    async for piece in pieces:
                        yield piece
            except TimeoutError:
                raise _late(self._asked.timeout_s) from None
        self._counts.answered(self._writing.metrics)

    async def _pump(self) -> None:
        try:
            async with aclosing(self._pieces()) as pieces:
                async for piece in pieces:
                    self._queue.put_nowait(piece)
            self._queue.put_nowait(None)
        except Exception as error:
            self._queue.put_nowait(error)

    async def _some(self, within_s: float) -> list[TextPiece | Exception | None]:
        """All that is there; nothing, where nothing came in time."""
        try:
            async with asyncio.timeout(within_s):
                found = [await self._queue.get()]
        except TimeoutError:
            return []
        while not self._queue.empty():
            found.append(self._queue.get_nowait())
        return found

    async def _events(
        self, some: list[TextPiece | Exception | None], pumping: "asyncio.Task[None]"
    ) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                if not some:
                    self._node.look_soon()
                    yield b": alive %.1f\n\n" % self._node.stalled_s
                if pieces := [item for item in some if isinstance(item, TextPiece)]:
                    yield b"".join(_event(_told(piece)) for piece in pieces)
                if some and not isinstance(some[-1], TextPiece):
                    yield self._last(some[-1])
                    return
                some = await self._some(PULSE_S)
        finally:
            pumping.cancel()
            await asyncio.wait({pumping})

    def _last(self, error: Exception | None) -> bytes:
        if error is None:
            return _event({"done": True} | self._summary())
        code = describe(error)["error"]["code"]
        log.warning("an answer failed: %s", error, extra={"request_id": self._id, "code": code})
        return _event(describe(error))

    def _summary(self) -> dict[str, Any]:
        metrics = self._writing.metrics
        log.info("answer done", extra={"request_id": self._id} | msgspec.to_builtins(metrics))
        usage = {
            "prompt_tokens": metrics.prompt_tokens,
            "completion_tokens": metrics.completion_tokens,
            "total_tokens": (metrics.prompt_tokens or 0) + metrics.completion_tokens,
        }
        return {"usage": usage, "metrics": msgspec.to_builtins(metrics)}


class Counts:
    """For Prometheus, by the names of every other node."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._ended = Counter("disagg_requests", "Ended, by outcome", ["role", "outcome"], registry=self.registry)
        self._read = Counter("disagg_prompt_tokens", "Of prompts", ["source"], registry=self.registry)
        self._written = Counter("disagg_generation_tokens", "Tokens of answers", registry=self.registry)
        self._total = self._histogram("request_seconds", "From the request to its end", "role")
        self._first = self._histogram("time_to_first_token_seconds", "From the request to its first text")

    def _histogram(self, name: str, words: str, *labels: str) -> Histogram:
        return Histogram(f"disagg_{name}", words, labels, buckets=SECONDS, registry=self.registry)

    def answered(self, metrics: TextMetrics) -> None:
        self._done("decode", metrics.finish_reason, metrics)
        self._written.inc(metrics.completion_tokens)
        self._first.observe(metrics.first_token_time)

    def read(self, metrics: TextMetrics) -> None:
        self._done("prefill", "read", metrics)

    def failed(self, role: str, error: BaseException) -> None:
        whose = "internal_error" if isinstance(error, Exception) else "cancelled"
        self._ended.labels(role, error.code if isinstance(error, DisaggError) else whose).inc()

    def _done(self, role: str, outcome: str, metrics: TextMetrics) -> None:
        self._ended.labels(role, outcome).inc()
        self._read.labels("ollama").inc(metrics.prompt_tokens or 0)  # computed or held there: it does not say
        self._total.labels(role).observe(metrics.total_time)

    @contextmanager
    def failures(self, role: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.failed(role, error)
            raise


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """A client that leaves cancels the work, and so closes the connection to Ollama."""
    working = asyncio.create_task(work)
    try:
        return await unless_gone(request, working, lambda: working.get_loop().call_soon_threadsafe(working.cancel))
    except asyncio.CancelledError:
        if (own := asyncio.current_task()) and own.cancelling():
            raise
        raise Cancelled("the client is gone") from None


async def _timed(work: Awaitable[Result], timeout_s: float) -> Result:
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError:
        raise _late(timeout_s) from None


def _late(timeout_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"not done within {timeout_s:g} s; ask for less, or for more time")


def _told(piece: TextPiece) -> dict[str, Any]:
    """As a token's event of another node, without the token: nobody knows its id, or how many the text is of."""
    event: dict[str, Any] = {"token": None, "text": piece.text}
    for name in ("thinking", "tool_calls", "finish_reason"):
        if value := getattr(piece, name):
            event[name] = value
    return event


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
