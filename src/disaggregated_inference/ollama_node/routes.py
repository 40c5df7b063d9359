"""The HTTP of a node in front of an Ollama: the paths and shapes of every other node. See docs/API.md."""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from disaggregated_inference.api import DoneEvent, StreamEvent, TextEvent, TextGenerateResponse, TextMetrics, Usage
from disaggregated_inference.errors import BadRequest, DeadlineExceeded, DisaggError, TicketNotFound
from disaggregated_inference.http import (
    EventStreamResponse,
    error_body,
    json_response,
    read_body,
    request_id,
    sse_event,
    unless_disconnected,
)
from disaggregated_inference.node import RequestMetrics, base_app
from disaggregated_inference.ollama_node.generation import OllamaGeneration, warm
from disaggregated_inference.ollama_node.node import OllamaNode
from disaggregated_inference.ollama_node.output import WarmContext, WarmMetrics, WarmResponse
from disaggregated_inference.ollama_node.requests import TextRequest, WarmRequest
from disaggregated_inference.timeouts import HttpTimeouts

log = logging.getLogger(__name__)

Result = TypeVar("Result")


def ollama_app(node: OllamaNode, token: str | None) -> Starlette:
    metrics = OllamaMetrics()
    routes = _prefill_routes(node, metrics) if node.role != "decode" else []
    routes += _decode_routes(node, metrics) if node.role != "prefill" else []

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        loading = asyncio.create_task(node.load_at_start())
        yield
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        await node.ollama.close()

    return base_app(node, metrics, routes, token, lifespan)


def _prefill_routes(node: OllamaNode, metrics: "OllamaMetrics") -> list[Route]:
    async def prefill(request: Request) -> Response:
        params = await read_body(request, WarmRequest)
        params.require_possible()
        request.state.started = True
        with metrics.failures("prefill"), node.admit():
            result = await unless_disconnected(request, _in_time(warm(node, params), params.timeout_s))
        metrics.count_prefill(result)
        context = WarmContext(model=node.ollama.model, prompt_tokens=result.prompt_tokens)
        told = WarmMetrics.of(result)
        log.info("prefill done", extra={"request_id": request_id(request)} | msgspec.structs.asdict(told))
        ticket = params.ticket or secrets.token_urlsafe(16)
        tokens = result.prompt_tokens
        return json_response(WarmResponse(context=context.encode(), ticket=ticket, prompt_tokens=tokens, metrics=told))

    async def cancel(request: Request) -> Response:
        raise TicketNotFound("no such ticket: a node in front of an Ollama has no tickets")

    return [
        Route("/prefill", prefill, methods=["POST"]),
        Route("/prefill/{ticket}", cancel, methods=["DELETE"]),
    ]


def _decode_routes(node: OllamaNode, metrics: "OllamaMetrics") -> list[Route]:
    async def decode(request: Request) -> Response:
        params = await read_body(request, TextRequest)
        if params.context is not None:
            WarmContext.require(params.context)
            if params.prompt is None and params.messages is None:
                raise BadRequest("context: it has no KV, because Ollama keeps that; send the prompt too")
        return await generate_response(request, params)

    async def generate(request: Request) -> Response:
        params = await read_body(request, TextRequest)
        if params.context is not None:
            raise BadRequest("/generate takes no context: send it to /decode")
        return await generate_response(request, params)

    async def generate_response(request: Request, params: TextRequest) -> Response:
        params.require_possible()
        request.state.started = True
        response = _GenerateResponse(node, params, metrics, request_id(request))
        if not params.stream:
            return json_response(await unless_disconnected(request, response.document()))
        timeouts = HttpTimeouts(early_error_s=node.timeouts.early_error_s, keepalive_s=node.timeouts.heartbeat_s)
        return EventStreamResponse(
            request, response.events(), response.describe_error, keepalive=node.heartbeat, timeouts=timeouts
        )

    return [Route("/decode", decode, methods=["POST"]), Route("/generate", generate, methods=["POST"])]


class _GenerateResponse:
    """One generation, as a JSON document or as server-sent events."""

    def __init__(self, node: OllamaNode, params: TextRequest, metrics: "OllamaMetrics", id: str) -> None:
        self._node, self._params, self._metrics, self._id = node, params, metrics, id
        self._generation = OllamaGeneration(node, params)

    async def document(self) -> TextGenerateResponse:
        events = [event async for event in self._pieces()]
        return TextGenerateResponse(
            generated_text="".join(event.text for event in events),
            tokens=None,
            finish_reason=events[-1].finish_reason,
            thinking="".join(event.thinking for event in events),
            tool_calls=tuple(call for event in events for call in event.tool_calls),
            usage=self._done().usage,
            metrics=self._generation.metrics,
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                yield sse_event(piece)
        yield sse_event(self._done())

    def describe_error(self, error: Exception) -> bytes:
        detail = error_body(error).error
        log.warning("generation failed: %s", error, extra={"request_id": self._id, "code": detail.code})
        return sse_event(StreamEvent(error=detail))

    async def _pieces(self) -> AsyncGenerator[TextEvent, None]:
        with self._metrics.failures("decode"), self._node.admit():
            async with (
                aclosing(self._generation.pieces()) as pieces,
                aclosing(_each_in_time(pieces, self._params.timeout_s)) as timed,
            ):
                async for piece in timed:
                    yield piece
        self._metrics.count_decode(self._generation.metrics)

    def _done(self) -> DoneEvent:
        metrics = self._generation.metrics
        log.info("generation done", extra={"request_id": self._id} | msgspec.to_builtins(metrics))
        usage = Usage(
            prompt_tokens=metrics.prompt_tokens,
            completion_tokens=metrics.completion_tokens,
            total_tokens=(metrics.prompt_tokens or 0) + metrics.completion_tokens,
        )
        return DoneEvent(done=True, usage=usage, node_metrics=metrics)


class OllamaMetrics(RequestMetrics):
    """Prometheus metrics, by the names that other nodes use."""

    def count_decode(self, metrics: TextMetrics) -> None:
        self._count("decode", metrics.finish_reason, metrics)
        self.generated_tokens.inc(metrics.completion_tokens)
        self.first_token.observe(metrics.first_token_time)

    def count_prefill(self, metrics: TextMetrics) -> None:
        self._count("prefill", "read", metrics)

    def _count(self, role: str, outcome: str, metrics: TextMetrics) -> None:
        self.requests.labels(role, outcome).inc()
        self.prompt_tokens.labels("ollama").inc(metrics.prompt_tokens or 0)  # Ollama does not say which were cached
        self.total.labels(role).observe(metrics.total_time)

    @contextmanager
    def failures(self, role: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            code = "internal_error" if isinstance(error, Exception) else "cancelled"
            self.requests.labels(role, error.code if isinstance(error, DisaggError) else code).inc()
            raise


async def _in_time(work: Awaitable[Result], timeout_s: float) -> Result:
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError:
        raise _late(timeout_s) from None


async def _each_in_time(items: AsyncGenerator[Result, None], timeout_s: float) -> AsyncGenerator[Result, None]:
    """The items that come before the time is over. The timeout is set anew for each item, because the first and the
    later items are awaited by different tasks."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                item = await anext(items, None)
        except TimeoutError:
            raise _late(timeout_s) from None
        if item is None:
            return
        yield item


def _late(timeout_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"the request was not done within {timeout_s:g} s: lower max_tokens, or raise timeout_s")
