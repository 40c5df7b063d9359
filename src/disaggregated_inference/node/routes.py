"""HTTP in front of a node: JSON in, JSON or server-sent events out, every error typed. See docs/API.md."""

import asyncio
import base64
import logging
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from disaggregated_inference.errors import (
    BadRequest,
    Cancelled,
    DeadlineExceeded,
    DisaggError,
    NodeRestarted,
    TicketNotFound,
)
from disaggregated_inference.http.middleware import Bearer, RequestId, request_id
from disaggregated_inference.node.context import PrefillContext
from disaggregated_inference.node.generation import Generation, GenerationParams
from disaggregated_inference.node.metrics import NodeMetrics
from disaggregated_inference.node.node import Node
from disaggregated_inference.node.requests import (
    BODY_LIMIT_BYTES,
    INLINE_LIMIT_BYTES,
    DecodeRequest,
    PrefillRequest,
    body_of,
)
from disaggregated_inference.node.streaming import error_response, json_response, respond, unless_gone

log = logging.getLogger(__name__)

_ROLES = {"/prefill": "prefill", "/decode": "decode", "/generate": "decode"}  # of the paths that are counted


def node_app(served: Node, token: str | None) -> Starlette:
    """The paths of the roles that this process has."""
    metrics = NodeMetrics(served)
    routes = _shared_routes(served, metrics)
    routes += _prefill_routes(served) if served.prefill else []
    routes += _decode_routes(served) if served.decode else []

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, DisaggError)
        about = {"request_id": request_id(request), "path": request.scope["path"], "code": error.code}
        log.warning("refused: %s", error, extra=about)
        _count(metrics, request, error)
        return error_response(error, served.retry_after_s)

    guards = [Middleware(RequestId), *([Middleware(Bearer, token=token)] if token else [])]
    handlers: dict[Any, Any] = {DisaggError: refused, 404: no_route, 405: no_route}
    return Starlette(routes=routes, middleware=guards, exception_handlers=handlers)


def _require_epoch(request: Request, served: Node) -> None:
    """Who knows this node by its epoch means that one: started again, it may hold another model."""
    if request.headers.get("x-node-epoch", served.epoch) != served.epoch:
        raise NodeRestarted("this node was started again since you heard of it; ask for its status")


def _count(metrics: NodeMetrics, request: Request, error: DisaggError) -> None:
    """What was refused before it was begun. Whatever was begun is counted where it ends, however it does."""
    role = _ROLES.get(request.scope["path"])
    if role and not getattr(request.state, "begun", False):
        metrics.refused(role, error)


def _shared_routes(served: Node, metrics: NodeMetrics) -> list[Route]:
    kv_memory = served.kv_memory

    async def health(request: Request) -> Response:
        state = served.health()
        return json_response(state, 503 if state["status"] in ("unhealthy", "draining") else 200)

    async def status(request: Request) -> Response:
        return json_response(served.status())

    async def exposition(request: Request) -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def about_model(request: Request) -> Response:
        return json_response(await asyncio.to_thread(served.about_model))

    async def tokenizer(request: Request) -> Response:
        return json_response(await asyncio.to_thread(served.model.tokenizer.whole))

    async def drain(request: Request) -> Response:
        """As SIGTERM does: no new work; what is under way is finished, then the process ends."""
        kv_memory.draining = True
        left = sum(node.open_requests for node in (served.prefill, served.decode) if node)
        stop = BackgroundTask(os.kill, os.getpid(), signal.SIGTERM)
        response = json_response({"draining": True, "waiting": left})
        response.background = stop
        return response

    async def load(request: Request) -> Response:
        kv_memory.require_open()
        await asyncio.wrap_future(
            kv_memory.scheduler.post(kv_memory.load)
        )  # no thread waits: others need them meanwhile
        return json_response(served.health())

    async def unload(request: Request) -> Response:
        await asyncio.wrap_future(kv_memory.scheduler.post(kv_memory.unload))
        return json_response(served.health())

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


def _prefill_routes(served: Node) -> list[Route]:
    node, model = served.prefill, served.model
    assert node

    async def prefill(request: Request) -> Response:
        asked = await body_of(request, PrefillRequest)
        _require_epoch(request, served)
        asked.require_sensible()
        tokens = await asyncio.to_thread(recalled, asked)
        reached_at = request.scope["server"][0]
        context, reading = node.begin(tokens, asked.ticket, reached_at, asked.queue_s, asked.timeout_s)
        request.state.begun = True
        context = asked.addressed(context)
        answer: dict[str, Any] = {"context": context.encode(), "ticket": context.ticket, "prompt_tokens": len(tokens)}
        about = {"request_id": request_id(request), "ticket": context.ticket, "prompt_tokens": len(tokens)}
        leave = partial(node.book.cancel, context.ticket)
        try:
            # Who has no memory here yet must not take any of a decode node's: they could wait for each other.
            await unless_gone(request, asyncio.wrap_future(node.admitted(context.ticket)), leave)
            if not asked.wait:
                reading.add_done_callback(lambda done: done.exception())  # the fetch hears of it
                log.info("prefill begun", extra=about)
                return json_response(answer)
            metrics = await unless_gone(request, asyncio.wrap_future(reading), leave)
        except DisaggError:
            node.book.cancel(context.ticket)  # nobody will ever have its context
            raise
        answer["metrics"] = msgspec.to_builtins(metrics)
        log.info("prefill done", extra=about | answer["metrics"])
        if not asked.inline:
            return json_response(answer)
        return await asyncio.to_thread(with_cache, answer | {"input_ids": tokens}, context.ticket)

    def recalled(asked: PrefillRequest) -> list[int]:
        tokens = asked.to_tokens(model)
        node.kv_memory.prefixes.recall(tokens)
        return tokens

    def with_cache(answer: dict[str, Any], ticket: str) -> Response:
        content = node.inline(ticket, INLINE_LIMIT_BYTES)
        return json_response(answer | {"kv_cache": base64.b64encode(content).decode()})

    async def cancel(request: Request) -> Response:
        found = await asyncio.to_thread(node.book.cancel, request.path_params["ticket"])
        if not found:
            raise TicketNotFound("no such ticket: unknown, fetched, cancelled or expired")
        return json_response({"cancelled": True})

    return [
        Route("/prefill", prefill, methods=["POST"]),
        Route("/prefill/{ticket}", cancel, methods=["DELETE"]),
    ]


def _decode_routes(served: Node) -> list[Route]:
    node, model = served.decode, served.model
    assert node

    async def decode(request: Request) -> Response:
        asked = await body_of(request, DecodeRequest, BODY_LIMIT_BYTES + INLINE_LIMIT_BYTES * 4 // 3)
        return await answered(request, asked)

    async def generate(request: Request) -> Response:
        asked = await body_of(request, DecodeRequest)
        if asked.context is not None or asked.kv_cache is not None:
            raise BadRequest("/generate reads the prompt itself; a context or kv_cache is for /decode")
        return await answered(request, asked)

    async def answered(request: Request, asked: DecodeRequest) -> Response:
        _require_epoch(request, served)
        rules = msgspec.structs.replace(asked.rules(), arrived_at=time.perf_counter())
        await prepare(request, rules)
        answer = await asyncio.to_thread(begin, asked, rules, request_id(request))
        request.state.begun = True
        return await respond(request, answer, asked.stream, lambda: node.scheduler.stalled_s)

    async def prepare(request: Request, rules: GenerationParams) -> None:
        """A new grammar may take seconds. They are the request's own: its time runs, its client may leave, and nobody
        else waits."""
        if rules.format is None:
            return
        node.kv_memory.require_open()
        rules.require_valid(node.engine.spec.vocabulary)
        ready = node.grammars.prepare(rules.format)
        over = DeadlineExceeded(f"the format was not read within {rules.timeout_s:g} s; ask for less, or for more time")
        late = asyncio.get_running_loop().call_later(rules.timeout_s, _give_up, ready, over)
        try:
            gone = Cancelled("the client is gone")
            await unless_gone(request, asyncio.wrap_future(ready), lambda: _give_up(ready, gone))
        finally:
            late.cancel()

    def begin(asked: DecodeRequest, rules: GenerationParams, name: str) -> Generation:
        if asked.context is not None:
            context = PrefillContext.decode(asked.context)
            return node.fetch_and_write(context, request_id=name, rules=rules, tokens=asked.tokens)
        if asked.kv_cache is not None:
            return node.play_and_write(asked.tape(), request_id=name, rules=rules)
        return node.read_and_write(asked.to_tokens(model), request_id=name, rules=rules)

    return [Route("/decode", decode, methods=["POST"]), Route("/generate", generate, methods=["POST"])]


def _give_up(waiting: "Future[Any]", error: DisaggError) -> None:
    with suppress(InvalidStateError):  # it has just ended
        waiting.set_exception(error)


async def no_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    words = "no such path" if status == 404 else f"{request.method} is not for this path"
    code = "not_found" if status == 404 else "method_not_allowed"
    return json_response({"error": {"code": code, "message": f"{words}: {request.scope['path']}"}}, status)


Ready = Callable[[int], None]


def serve_app(app: Starlette, host: str, port: int, drain_s: int, ready: Ready, stopping: Callable[[], None]) -> None:
    """Run until a signal; `ready` is told the port once requests are taken, `stopping` when that is over."""
    import uvicorn

    class NodeServer(uvicorn.Server):
        async def startup(self, sockets: list[Any] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                ready(self.servers[0].sockets[0].getsockname()[1])

        async def shutdown(self, sockets: list[Any] | None = None) -> None:
            stopping()
            await super().shutdown(sockets)

    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=drain_s,
    )
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # uvicorn drains on it, then raises it again for whoever was before
    NodeServer(config).run()
