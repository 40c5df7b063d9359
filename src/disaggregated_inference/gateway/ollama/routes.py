"""Ollama's API: programs written for it move over by changing the host."""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from disaggregated_inference.errors import DisaggError, ModelNotFound, NoDecodeNode, NotOffered
from disaggregated_inference.gateway.chat import ChatDelta, ChatRequest, Parts, asked, converse
from disaggregated_inference.gateway.cluster.routes import SERVES, window_of
from disaggregated_inference.gateway.ollama.models import model_of, ps, show, tags
from disaggregated_inference.gateway.ollama.output import OllamaChunk, OllamaWriter, line
from disaggregated_inference.gateway.ollama.requests import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaModelRequest,
    OllamaRequest,
    read,
)
from disaggregated_inference.gateway.request_context import RequestContext
from disaggregated_inference.gateway.tool_parsers.base import TextDelta
from disaggregated_inference.http.sse import body_of, json_response, streamed, unless_gone
from disaggregated_inference.models.tokenizer import ModelTokenizer
from disaggregated_inference.orchestrator import Delta, DisaggregatedInference
from disaggregated_inference.orchestrator.threads import in_thread

log = logging.getLogger(__name__)

VERSION = "0.13.0"  # of the Ollama whose API this is: programs look before they think, call tools or ask for a schema
_LINES = "application/x-ndjson"
_ABSENT = {
    "/api/push": "models are not published from here; share their folder",
    "/api/create": "models come with the nodes; start one with it: `disagg serve --model ...`",
    "/api/copy": "a second name for a model is an alias in the cluster file",
    "/api/delete": "models stay; take its nodes out of the cluster file",
    "/api/embed": "no node makes embeddings; ask an Ollama for them",
    "/api/embeddings": "no node makes embeddings; ask an Ollama for them",
    "/api/blobs/{digest}": "models come with the nodes; start one with it: `disagg serve --model ...`",
}


def routes() -> list[Route]:
    return [
        Route("/", _running),
        Route("/api/generate", _generate, methods=["POST"]),
        Route("/api/chat", _chat, methods=["POST"]),
        Route("/api/tags", tags),
        Route("/api/show", show, methods=["POST"]),
        Route("/api/ps", ps),
        Route("/api/version", _version),
        Route("/api/pull", _pull, methods=["POST"]),
        *(Route(path, _absent(words), methods=["GET", "POST", "DELETE"]) for path, words in _ABSENT.items()),
    ]


def error_body(error: Exception) -> dict[str, Any]:
    return {"error": str(error) if isinstance(error, DisaggError) else "something went wrong here"}


async def _running(request: Request) -> Response:
    """What programs look for to see whether anyone is there."""
    return PlainTextResponse("Ollama is running")


async def _version(request: Request) -> Response:
    return json_response({"version": VERSION})


async def _pull(request: Request) -> Response:
    """Many programs pull before they ask. What the cluster has is there already."""
    call, named = RequestContext(request), read(await body_of(request), OllamaModelRequest)
    try:
        model_of(call, named.model or named.name)
    except ModelNotFound as error:
        raise NotOffered(f"{error}; models are not fetched from here: start a node with it, `disagg serve`") from error
    return Response(line({"status": "success"}), media_type=_LINES)


def _absent(words: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(request: Request) -> Response:
        raise NotOffered(f"{request.url.path}: {words}")

    return refuse


async def _generate(request: Request) -> Response:
    call, wanted = RequestContext(request), read(await body_of(request), OllamaGenerateRequest)
    wanted.require_possible()
    model = model_of(call, wanted.model)
    if not wanted.prompt:
        return await _loaded(call, model, wanted)
    tokenizer, options = await call.core.tokenizer(model), wanted.plain() | call.options()
    if wanted.raw or not (tokenizer.chat_template or wanted.images):
        parts = _plain_parts(call.core, await _prompted(call, model, wanted, options))
    else:
        template = wanted.template(tokenizer)
        turn = ChatRequest(model=model, messages=wanted.messages(), template=template, options=options)
        parts = converse(call.core, await _roomy(call.core, turn, wanted))
    return await _answer(request, call, wanted, parts, tokenizer)


async def _chat(request: Request) -> Response:
    call, wanted = RequestContext(request), read(await body_of(request), OllamaChatRequest)
    model = model_of(call, wanted.model)
    if not wanted.messages:
        return await _loaded(call, model, wanted)
    tokenizer = await call.core.tokenizer(model)
    turn = ChatRequest(
        model=model,
        messages=[message.plain() for message in wanted.messages],
        tools=wanted.plain_tools(tokenizer),
        template=wanted.template(tokenizer),
        options=wanted.plain() | call.options(),
    )
    return await _answer(request, call, wanted, converse(call.core, await _roomy(call.core, turn, wanted)), tokenizer)


async def _roomy(core: DisaggregatedInference, turn: ChatRequest, wanted: OllamaRequest) -> ChatRequest:
    """Where an answer may go on until the window is full: with what the prompt leaves of it."""
    if not wanted.tuning().fills_window:
        return turn
    tokenizer = await core.tokenizer(turn.model)
    plain = asked(turn, tokenizer)
    text = tokenizer.render_chat(plain["messages"], **plain["template"])
    assert turn.model
    left = await _left(core, turn.model, tokenizer, text)
    return msgspec.structs.replace(turn, options=turn.options | left)


async def _prompted(
    call: RequestContext, model: str, wanted: OllamaGenerateRequest, options: dict[str, Any]
) -> dict[str, Any]:
    assert wanted.prompt
    left: dict[str, Any] = {}
    if wanted.tuning().fills_window:
        left = await _left(call.core, model, await call.core.tokenizer(model), wanted.prompt)
    return options | left | {"model": model, "prompt": wanted.prompt}


async def _left(core: DisaggregatedInference, model: str, tokenizer: ModelTokenizer, text: str) -> dict[str, Any]:
    window = await window_of(core, model)
    assert window  # who handed out the tokenizer has said it
    tokens = await in_thread(lambda: tokenizer.encode_within(text, window))
    return {"max_tokens": max(1, window - len(tokens))}


async def _plain_parts(core: DisaggregatedInference, options: dict[str, Any]) -> Parts:
    """Without a template before it and a parser behind it."""
    async with aclosing(core.batches(**options)) as batches:
        async for deltas in batches:
            yield [_part(delta) for delta in deltas]


def _part(delta: Delta) -> ChatDelta:
    return ChatDelta(
        said=(TextDelta(delta.text),) if delta.text else (),
        token=delta.token,
        logprob=delta.logprob,
        top_logprobs=delta.top_logprobs,
        finish_reason=delta.finish_reason,  # type: ignore[arg-type]
        metrics=delta.metrics,
    )


async def _answer(
    request: Request, call: RequestContext, wanted: OllamaRequest, parts: Parts, tokenizer: ModelTokenizer
) -> Response:
    telling = OllamaWriter(wanted.model or call.model(None), isinstance(wanted, OllamaChatRequest), tokenizer)
    if not wanted.streams:
        return json_response(await unless_gone(request, _whole(parts, telling)), headers=call.headers())
    # NDJSON has no comments: what keeps the connection alive is a piece of nothing.
    pulse = line(telling.told(OllamaChunk()))
    return await streamed(request, _lines(parts, telling), _failure, call.headers, pulse, _LINES)


async def _lines(batches: Parts, telling: OllamaWriter) -> AsyncGenerator[bytes, None]:
    async with aclosing(batches):
        async for parts in batches:
            if lines := b"".join([_line(telling, part) for part in parts]):
                yield lines


def _line(telling: OllamaWriter, part: ChatDelta) -> bytes:
    if part.metrics is not None:
        return line(telling.end(part.metrics))
    piece = telling.piece(part)
    return line(telling.told(piece)) if piece else b""


async def _whole(batches: Parts, telling: OllamaWriter) -> dict[str, Any]:
    whole, metrics = OllamaChunk(), {}
    async with aclosing(batches):
        async for parts in batches:
            for part in parts:
                whole.add(telling.piece(part))
                metrics = part.metrics or {}
    return telling.end(metrics, whole)


def _failure(error: Exception) -> bytes:
    """A stream's last line, where it ends in an error."""
    if not isinstance(error, DisaggError):
        log.error("a stream failed", exc_info=error)
    return line(error_body(error))


async def _loaded(call: RequestContext, model: str, wanted: OllamaRequest) -> Response:
    """Without anything to answer it is about the model alone: is it there?"""
    if wanted.unloads:
        raise NotOffered("models stay loaded here: their nodes decide, see `disagg serve --idle-unload`")
    telling = OllamaWriter(
        wanted.model or model, isinstance(wanted, OllamaChatRequest), await call.core.tokenizer(model)
    )
    if (await call.core.status())["models"][model] not in SERVES:
        raise NoDecodeNode()
    return Response(line(telling.loaded()), media_type=_LINES if wanted.streams else "application/json")
