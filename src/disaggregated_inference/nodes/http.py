"""HTTP in front of a node: JSON in, JSON or server-sent events out, every error typed. See docs/API.md."""

import asyncio
import base64
import json
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from disaggregated_inference.errors import BadRequest, Cancelled, DisaggError, TicketNotFound
from disaggregated_inference.models import ModelFiles
from disaggregated_inference.nodes.context import Context
from disaggregated_inference.nodes.decode import Answer, DecodeNode, Item
from disaggregated_inference.nodes.guards import Bearer, RequestId, describe, request_id
from disaggregated_inference.nodes.prefill import PrefillNode
from disaggregated_inference.nodes.requests import (
    BODY_LIMIT_BYTES,
    INLINE_LIMIT_BYTES,
    DecodeRequest,
    PrefillRequest,
    body_of,
)
from disaggregated_inference.wire.paths import spoken

log = logging.getLogger(__name__)

DRAIN_S = 10

Result = TypeVar("Result")


def prefill_app(node: PrefillNode, model: ModelFiles, token: str | None) -> Starlette:
    async def prefill(request: Request) -> Response:
        asked = await body_of(request, PrefillRequest)
        asked.require_sensible()
        tokens = await asyncio.to_thread(asked.to_tokens, model)
        context, reading = node.begin(tokens, asked.ticket, request.scope["server"][0])
        answer: dict[str, Any] = {"context": context.encode(), "ticket": context.ticket, "prompt_tokens": len(tokens)}
        about = {"request_id": request_id(request), "ticket": context.ticket, "prompt_tokens": len(tokens)}
        if not asked.wait:
            reading.add_done_callback(lambda done: done.exception())  # the fetch hears of it
            log.info("prefill begun", extra=about)
            return JSONResponse(answer)
        metrics = await _unless_gone(request, asyncio.wrap_future(reading), lambda: node.book.cancel(context.ticket))
        answer["metrics"] = msgspec.to_builtins(metrics)
        log.info("prefill done", extra=about | answer["metrics"])
        if not asked.inline:
            return JSONResponse(answer)
        return await asyncio.to_thread(with_cache, answer | {"input_ids": tokens}, context.ticket)

    def with_cache(answer: dict[str, Any], ticket: str) -> Response:
        content = node.inline(ticket, INLINE_LIMIT_BYTES)
        return JSONResponse(answer | {"kv_cache": base64.b64encode(content).decode()})

    async def cancel(request: Request) -> Response:
        found = await asyncio.to_thread(node.book.cancel, request.path_params["ticket"])
        if not found:
            raise TicketNotFound("no such ticket: unknown, fetched, cancelled or expired")
        return JSONResponse({"cancelled": True})

    async def status(request: Request) -> Response:
        held = {"tickets": len(node.book), "endings": msgspec.to_builtins(node.book.endings)}
        held["kv_addresses"] = [spoken(address) for address in node.kv_addresses]
        return JSONResponse(_about(node, model, "prefill") | held)

    routes = [
        Route("/prefill", prefill, methods=["POST"]),
        Route("/prefill/{ticket}", cancel, methods=["DELETE"]),
        Route("/status", status),
    ]
    return _app(node, model, "prefill", routes, token)


def decode_app(node: DecodeNode, model: ModelFiles, token: str | None) -> Starlette:
    async def decode(request: Request) -> Response:
        asked = await body_of(request, DecodeRequest, BODY_LIMIT_BYTES + INLINE_LIMIT_BYTES * 4 // 3)
        asked.require_supported()
        if asked.context is None and asked.kv_cache is None:
            return await generate_from(request, asked)
        if asked.context is not None:
            start: Callable[..., Answer] = node.fetch_and_write
            source: Any = Context.decode(asked.context)
        else:
            start, source = node.play_and_write, await asyncio.to_thread(asked.tape)
        answer = await asyncio.to_thread(start, source, asked.max_new_tokens, request_id(request))
        return await _respond(request, answer, model, asked.stream)

    async def generate(request: Request) -> Response:
        asked = await body_of(request, DecodeRequest)
        asked.require_supported()
        if asked.context is not None or asked.kv_cache is not None:
            raise BadRequest("/generate reads the prompt itself; a context or kv_cache is for /decode")
        return await generate_from(request, asked)

    async def generate_from(request: Request, asked: DecodeRequest) -> Response:
        tokens = await asyncio.to_thread(asked.to_tokens, model)
        answer = await asyncio.to_thread(node.read_and_write, tokens, asked.max_new_tokens, request_id(request))
        return await _respond(request, answer, model, asked.stream)

    async def status(request: Request) -> Response:
        seen = {"paths": node.paths.seen(), "peers": node.proofs.seen(), "canary_tokens": node.proofs.tokens_computed}
        about = _about(node, model, "decode")
        about["prompt_tokens_computed"] -= node.proofs.tokens_computed
        return JSONResponse(about | msgspec.to_builtins(seen))

    routes = [
        Route("/decode", decode, methods=["POST"]),
        Route("/generate", generate, methods=["POST"]),
        Route("/status", status),
    ]
    return _app(node, model, "decode", routes, token)


def _about(node: PrefillNode | DecodeNode, model: ModelFiles, role: str) -> dict[str, Any]:
    engine, counters = node.engine, node.engine.counters
    return {
        "role": role,
        "model": model.name,
        "backend": engine.name,
        "dtype": engine.dtype,
        "epoch": node.epoch,
        "waiting": node.worker.waiting,
        "prompt_tokens_computed": counters.prompt_tokens,
        "tokens_written": counters.step_tokens,
        "context_window": engine.spec.context_window,
    }


def _app(
    node: PrefillNode | DecodeNode, model: ModelFiles, role: str, routes: list[Route], token: str | None
) -> Starlette:
    async def health(request: Request) -> Response:
        alive = node.healthy
        state = {"status": "healthy" if alive else "unhealthy", "model": model.name, "loaded": alive}
        return JSONResponse(
            state | {"backend": node.engine.name, "role": role, "epoch": node.epoch}, 200 if alive else 503
        )

    guards = [Middleware(RequestId), *([Middleware(Bearer, token=token)] if token else [])]
    handlers: dict[Any, Any] = {DisaggError: _refused, 404: _no_route, 405: _no_route}
    return Starlette(routes=[Route("/health", health), *routes], middleware=guards, exception_handlers=handlers)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, DisaggError)
    about = {"request_id": request_id(request), "path": request.url.path, "code": error.code}
    log.warning("refused: %s", error, extra=about)
    headers = {"Retry-After": "1"} if error.status == 503 else {}
    return JSONResponse(describe(error), error.status, headers)


async def _no_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    words = "no such path" if status == 404 else f"{request.method} is not for this path"
    code = "not_found" if status == 404 else "method_not_allowed"
    return JSONResponse({"error": {"code": code, "message": f"{words}: {request.url.path}"}}, status)


async def _unless_gone(request: Request, result: Awaitable[Result], cancel: Callable[[], object]) -> Result:
    """Wait for a result; a client that leaves meanwhile cancels it."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    waiting, leaving = asyncio.ensure_future(result), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({waiting, leaving}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        cancel()
        raise
    finally:
        leaving.cancel()
    if not waiting.done():
        await asyncio.to_thread(cancel)
        await asyncio.wait({waiting})
        waiting.exception()
        raise Cancelled("the client is gone")
    return waiting.result()


async def _respond(request: Request, answer: Answer, model: ModelFiles, stream: bool) -> Response:
    if stream:
        return StreamingResponse(_events(answer, model), media_type="text/event-stream")
    tokens = await _unless_gone(request, _all(answer), answer.cancel)
    text = model.tokenizer.stream()  # as a stream would have given it: never half a character
    written = "".join(map(text.push, tokens))
    return JSONResponse({"generated_text": written, "tokens": tokens, "metrics": _logged(answer)})


async def _events(answer: Answer, model: ModelFiles) -> AsyncIterator[str]:
    """One event per token; the last one carries the metrics, or the error."""
    text = model.tokenizer.stream()
    try:
        async for token in _tokens(answer):
            yield _event({"token": token, "text": text.push(token)})
        yield _event({"done": True, "metrics": _logged(answer)})
    except Exception as error:
        code = describe(error)["error"]["code"]
        log.warning("an answer failed: %s", error, extra={"request_id": answer.request_id, "code": code})
        yield _event(describe(error))
    finally:
        answer.cancel()


def _logged(answer: Answer) -> dict[str, Any]:
    metrics: dict[str, Any] = msgspec.to_builtins(answer.metrics)
    log.info("answer done", extra={"request_id": answer.request_id} | metrics)
    return metrics


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


async def _tokens(answer: Answer) -> AsyncIterator[int]:
    """As they come from the engine's thread; no thread waits for them here."""
    loop = asyncio.get_running_loop()
    items: asyncio.Queue[Item] = asyncio.Queue()

    def deliver(item: Item) -> None:
        loop.call_soon_threadsafe(items.put_nowait, item)

    answer.listen(deliver)
    while (item := await items.get()) is not None:
        if isinstance(item, BaseException):
            raise item
        yield item


async def _all(answer: Answer) -> list[int]:
    return [token async for token in _tokens(answer)]


Ready = Callable[[int], None]


def serve_app(app: Starlette, host: str, port: int, ready: Ready) -> None:
    """Run until a signal; `ready` is told the port once requests are taken."""
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[Any] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                ready(self.servers[0].sockets[0].getsockname()[1])

    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=DRAIN_S,
    )
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # uvicorn drains on it, then raises it again for whoever was before
    Server(config).run()
