"""HTTP in front of a node: JSON in, JSON or server-sent events out, every error typed. See docs/API.md."""

import asyncio
import hmac
import json
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from disaggregated_inference.errors import BadRequest, DisaggError
from disaggregated_inference.models import ModelFiles
from disaggregated_inference.nodes.context import Context
from disaggregated_inference.nodes.decode import Answer, DecodeNode
from disaggregated_inference.nodes.prefill import PrefillNode

_BODY_LIMIT_BYTES = 16 << 20


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt in one of three forms."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tokens: list[int] | None = None

    def to_tokens(self, model: ModelFiles) -> list[int]:
        given = [name for name in ("prompt", "messages", "tokens") if getattr(self, name) is not None]
        if len(given) != 1:
            raise BadRequest(f"give exactly one of prompt, messages and tokens, not {len(given)}")
        if self.tokens is not None:
            return self.tokens
        if self.messages is not None:
            return model.tokenizer.encode_chat(self.messages)
        return model.tokenizer.encode(self.prompt or "")


class PrefillRequest(Prompt, frozen=True, kw_only=True):
    ticket: str | None = None
    wait: bool = True  # false: answer at once, the fetch may begin before the prefill ends


class DecodeRequest(Prompt, frozen=True, kw_only=True):
    context: str | None = None
    max_new_tokens: int = 256
    temperature: float = 0.0
    stream: bool = False

    def require_supported(self) -> None:
        if self.max_new_tokens < 1:
            raise BadRequest("max_new_tokens must be at least 1")
        if self.temperature != 0:
            raise BadRequest("this node decodes greedily: leave temperature out, or set it to 0")


def prefill_app(node: PrefillNode, model: ModelFiles, token: str | None) -> Starlette:
    async def prefill(request: Request) -> Response:
        asked = await _body(request, PrefillRequest)
        tokens = await asyncio.to_thread(asked.to_tokens, model)
        context, reading = node.begin(tokens, asked.ticket)
        answer: dict[str, Any] = {"context": context.encode(), "ticket": context.ticket, "prompt_tokens": len(tokens)}
        if asked.wait:
            answer["metrics"] = msgspec.to_builtins(await asyncio.wrap_future(reading))
        else:
            reading.add_done_callback(lambda done: done.exception())  # the fetch hears of it
        return JSONResponse(answer)

    async def cancel(request: Request) -> Response:
        found = await asyncio.to_thread(node.book.cancel, request.path_params["ticket"])
        return JSONResponse({"cancelled": found}, 200 if found else 404)

    async def status(request: Request) -> Response:
        held = {"tickets": len(node.book), "endings": msgspec.to_builtins(node.book.endings)}
        return JSONResponse(_about(node, model, "prefill") | held | {"kv_address": list(node.kv_address)})

    routes = [
        Route("/prefill", prefill, methods=["POST"]),
        Route("/prefill/{ticket}", cancel, methods=["DELETE"]),
        Route("/status", status),
    ]
    return _app(node, model, "prefill", routes, token)


def decode_app(node: DecodeNode, model: ModelFiles, token: str | None) -> Starlette:
    async def decode(request: Request) -> Response:
        asked = await _body(request, DecodeRequest)
        asked.require_supported()
        if asked.context is None:
            return await generate_from(asked)
        context = Context.decode(asked.context)
        answer = await asyncio.to_thread(node.fetch_and_write, context, asked.max_new_tokens)
        return await _respond(answer, model, asked.stream)

    async def generate(request: Request) -> Response:
        asked = await _body(request, DecodeRequest)
        asked.require_supported()
        return await generate_from(asked)

    async def generate_from(asked: DecodeRequest) -> Response:
        tokens = await asyncio.to_thread(asked.to_tokens, model)
        answer = await asyncio.to_thread(node.read_and_write, tokens, asked.max_new_tokens)
        return await _respond(answer, model, asked.stream)

    async def status(request: Request) -> Response:
        return JSONResponse(_about(node, model, "decode"))

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
        alive = node.worker.alive
        state = {"status": "healthy" if alive else "unhealthy", "model": model.name, "loaded": alive}
        return JSONResponse(
            state | {"backend": node.engine.name, "role": role, "epoch": node.epoch}, 200 if alive else 503
        )

    guards = [Middleware(_Bearer, token=token)] if token else []
    handlers: dict[Any, Any] = {DisaggError: _refused}
    return Starlette(routes=[Route("/health", health), *routes], middleware=guards, exception_handlers=handlers)


async def _body(request: Request, kind: type[Any]) -> Any:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _BODY_LIMIT_BYTES:
            raise BadRequest(f"a request body of more than {_BODY_LIMIT_BYTES} bytes")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise BadRequest(str(error)) from error


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, DisaggError)
    headers = {"Retry-After": "1"} if error.status == 503 else {}
    return JSONResponse(describe(error), error.status, headers)


def describe(error: BaseException) -> dict[str, Any]:
    code = error.code if isinstance(error, DisaggError) else "internal_error"
    return {"error": {"code": code, "message": str(error)}}


async def _respond(answer: Answer, model: ModelFiles, stream: bool) -> Response:
    if stream:
        return StreamingResponse(_events(answer, model), media_type="text/event-stream")
    tokens = await asyncio.to_thread(list, answer)
    return JSONResponse(
        {
            "generated_text": model.tokenizer.decode(tokens),
            "tokens": tokens,
            "metrics": msgspec.to_builtins(answer.metrics),
        }
    )


async def _events(answer: Answer, model: ModelFiles) -> AsyncIterator[str]:
    """One event per token; the last one carries the metrics, or the error."""
    text = model.tokenizer.stream()
    try:
        async for token in _in_thread(answer):
            yield _event({"token": token, "text": text.push(token)})
        yield _event({"done": True, "metrics": msgspec.to_builtins(answer.metrics)})
    except Exception as error:
        yield _event(describe(error))
    finally:
        answer.cancelled = True


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


async def _in_thread(items: Iterator[int] | Answer) -> AsyncIterator[int]:
    """Iterate something that blocks, without blocking the event loop."""
    iterator, end = iter(items), object()
    while (item := await asyncio.to_thread(next, iterator, end)) is not end:
        assert isinstance(item, int)
        yield item


class _Bearer:
    """Everything but /health needs the node's token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._expected = app, f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                refusal = JSONResponse({"error": {"code": "unauthorized", "message": "a bearer token is needed"}}, 401)
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


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
        app, host=host, port=port, log_level="warning", access_log=False, timeout_graceful_shutdown=10
    )
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # uvicorn drains on it, then raises it again for whoever was before
    Server(config).run()
