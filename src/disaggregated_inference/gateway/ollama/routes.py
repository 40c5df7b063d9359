"""Ollama's API: the routes. Programs written for Ollama change the host only."""

from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from disaggregated_inference.errors import ModelNotFound, NotOffered
from disaggregated_inference.gateway.chat import ChatRequest, consume, encode_all, encode_prompt, stream_chat
from disaggregated_inference.gateway.cluster.routes import context_window
from disaggregated_inference.gateway.ollama.errors import error_body
from disaggregated_inference.gateway.ollama.models import model_of, ps, show, tags
from disaggregated_inference.gateway.ollama.output import OllamaChunk, OllamaWriter, encode_line
from disaggregated_inference.gateway.ollama.requests import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaModelRequest,
    OllamaRequest,
    read,
)
from disaggregated_inference.gateway.request_context import RequestContext
from disaggregated_inference.http import EventStreamResponse, json_response, read_json, unless_disconnected
from disaggregated_inference.models import ModelTokenizer
from disaggregated_inference.orchestrator import DisaggregatedInference, in_thread

__all__ = ["ID_HEADER", "NAME", "error_body", "owns", "routes"]

NAME, ID_HEADER = "ollama", "x-request-id"
VERSION = "0.13.0"  # programs check it before they use thinking, tools or schemas
_NDJSON = "application/x-ndjson"
NOT_OFFERED = {
    "/api/push": "the gateway publishes no models; share their folder",
    "/api/create": "models come with the nodes; start one: `disagg serve --model ...`",
    "/api/copy": "a second name for a model is an alias in the cluster file",
    "/api/delete": "models stay; take the model's nodes out of the cluster file",
    "/api/embed": "no node makes embeddings; use an Ollama for them",
    "/api/embeddings": "no node makes embeddings; use an Ollama for them",
    "/api/blobs/{digest}": "models come with the nodes; start one: `disagg serve --model ...`",
}


def owns(connection: HTTPConnection) -> bool:
    path: str = connection.scope["path"]
    return path.startswith("/api/")


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
        *(Route(path, _refuse(reason), methods=["GET", "POST", "DELETE"]) for path, reason in NOT_OFFERED.items()),
    ]


async def _running(request: Request) -> Response:
    """Programs check for an Ollama with it."""
    return PlainTextResponse("Ollama is running")


async def _version(request: Request) -> Response:
    return json_response({"version": VERSION})


async def _pull(request: Request) -> Response:
    """Many programs pull first. It succeeds where the cluster has the model."""
    context, wanted = RequestContext(request), read(await read_json(request), OllamaModelRequest)
    try:
        model_of(context, wanted.model or wanted.name)
    except ModelNotFound as error:
        raise NotOffered(f"{error}; the gateway downloads no models: start a node with it, `disagg serve`") from error
    return Response(encode_line({"status": "success"}), media_type=_NDJSON)


def _refuse(reason: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(request: Request) -> Response:
        raise NotOffered(f"{request.url.path}: {reason}")

    return refuse


async def _generate(request: Request) -> Response:
    context, wanted = RequestContext(request), read(await read_json(request), OllamaGenerateRequest)
    wanted.require_supported()
    model = model_of(context, wanted.model)
    if not wanted.prompt:
        return await _loaded(context, model, wanted)
    tokenizer = await context.core.tokenizer(model)
    if wanted.raw or not (tokenizer.chat_template or wanted.images):
        return await _respond(context, wanted, ChatRequest(model=model, prompt=wanted.prompt), tokenizer)
    chat = ChatRequest(model=model, messages=wanted.messages(), template=wanted.template(tokenizer))
    return await _respond(context, wanted, chat, tokenizer)


async def _chat(request: Request) -> Response:
    context, wanted = RequestContext(request), read(await read_json(request), OllamaChatRequest)
    model = model_of(context, wanted.model)
    if not wanted.messages:
        return await _loaded(context, model, wanted)
    tokenizer = await context.core.tokenizer(model)
    chat = ChatRequest(
        model=model,
        messages=[message.plain() for message in wanted.messages],
        tools=wanted.plain_tools(tokenizer),
        template=wanted.template(tokenizer),
    )
    return await _respond(context, wanted, chat, tokenizer)


async def _respond(
    context: RequestContext, wanted: OllamaRequest, chat: ChatRequest, tokenizer: ModelTokenizer
) -> Response:
    request, options = context.request, wanted.plain() | context.options(wanted.cache_salt)
    chat = msgspec.structs.replace(chat, format=wanted.output_format(), options=options)
    if wanted.sampling().fills_window:
        limit = await _remaining_window(context.core, chat, tokenizer)
        chat = msgspec.structs.replace(chat, options=options | {"max_tokens": limit})
    batches = stream_chat(context.core, chat, context.on_plan)
    writer = OllamaWriter(context.shown_model, isinstance(wanted, OllamaChatRequest), tokenizer)
    if not wanted.is_streamed:
        await unless_disconnected(request, consume(batches, writer.take))
        return json_response(writer.end(), headers=context.headers())

    def failed(error: Exception) -> bytes:
        return encode_line(error_body(error))

    keepalive = encode_line(writer.body(OllamaChunk()))  # NDJSON has no comments: an empty line of content
    lines = encode_all(batches, writer.line)
    return EventStreamResponse(request, lines, failed, context.headers, keepalive, _NDJSON)


async def _remaining_window(core: DisaggregatedInference, chat: ChatRequest, tokenizer: ModelTokenizer) -> int:
    """What the prompt leaves of the context window, for a completion without a limit."""
    window = await context_window(core, chat.model or "")
    assert window  # known: it comes with the tokenizer
    tokens = await in_thread(lambda: encode_prompt(chat, tokenizer, window))
    return max(1, window - len(tokens))


async def _loaded(context: RequestContext, model: str, wanted: OllamaRequest) -> Response:
    """A request without a prompt: whether the model is available."""
    if wanted.unloads:
        raise NotOffered("models stay loaded: their nodes decide, see `disagg serve --idle-unload`")
    tokenizer = await context.core.tokenizer(model)
    writer = OllamaWriter(context.shown_model, isinstance(wanted, OllamaChatRequest), tokenizer)
    await context.core.require_decode_node(model)
    media_type = _NDJSON if wanted.is_streamed else "application/json"
    return Response(encode_line(writer.loaded()), headers=context.headers(), media_type=media_type)
