"""Anthropic's Messages API: the routes."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import Route

from disaggregated_inference.gateway.anthropic.errors import error_body
from disaggregated_inference.gateway.anthropic.models import AnthropicRoute, is_anthropic, model, models
from disaggregated_inference.gateway.anthropic.output import AnthropicMessageBuilder
from disaggregated_inference.gateway.anthropic.requests import CountTokensRequest, MessagesRequest, read
from disaggregated_inference.gateway.chat import ChatDeltas, consume, encode_prompt, stream_chat
from disaggregated_inference.gateway.content_blocks import encode_event
from disaggregated_inference.gateway.reasoning_effort import can_think
from disaggregated_inference.gateway.request_context import RequestContext
from disaggregated_inference.http import (
    EventStreamResponse,
    json_response,
    read_json,
    sse_comment,
    unless_disconnected,
)
from disaggregated_inference.orchestrator import in_thread

__all__ = ["ID_HEADER", "NAME", "error_body", "owns", "routes"]

NAME, ID_HEADER = "anthropic", "request-id"


def owns(connection: HTTPConnection) -> bool:
    path: str = connection.scope["path"]
    return path.startswith("/v1/messages") or (path.startswith("/v1/models") and is_anthropic(connection))


def routes() -> list[Route]:
    return [
        AnthropicRoute("/v1/models", models, methods=["GET"]),
        AnthropicRoute("/v1/models/{name:path}", model, methods=["GET"]),
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    ]


async def messages(request: Request) -> Response:
    context, wanted = RequestContext(request), read(await read_json(request), MessagesRequest)
    model = context.model(wanted.model)
    chat = wanted.chat_request(model, context.options(wanted.cache_salt))
    tokenizer = await context.core.tokenizer(model)
    if wanted.requires_thinking and not can_think(tokenizer):
        context.note(f"thinking: {model} does not think")
    builder = AnthropicMessageBuilder(wanted, context.shown_model, tokenizer)
    batches = stream_chat(context.core, chat, context.on_plan)
    if not wanted.stream:
        await unless_disconnected(request, consume(batches, builder.take))
        return json_response(builder.message(), headers=_headers(context))

    def failed(error: Exception) -> bytes:
        return encode_event(error_body(error, context.id))

    events = _events(builder, batches)
    return EventStreamResponse(request, events, failed, lambda: _headers(context), builder.keepalive)


async def count_tokens(request: Request) -> Response:
    context, wanted = RequestContext(request), read(await read_json(request), CountTokensRequest)
    model = context.model(wanted.model)
    tokenizer = await context.core.tokenizer(model)
    chat = wanted.chat_request(model, {})
    tokens = await unless_disconnected(request, in_thread(lambda: encode_prompt(chat, tokenizer)))
    return json_response({"input_tokens": len(tokens)}, headers=_headers(context))


def _headers(context: RequestContext) -> dict[str, str]:
    return context.headers() | {ID_HEADER: context.id}


async def _events(builder: AnthropicMessageBuilder, batches: ChatDeltas) -> AsyncGenerator[bytes, None]:
    async with aclosing(batches):
        async for deltas in batches:
            if comments := b"".join([sse_comment(delta.waiting) for delta in deltas if delta.waiting]):
                yield comments
            if events := b"".join([encode_event(event) for delta in deltas for event in builder.take(delta)]):
                yield events
                builder.start_sent = True  # the stream continues here once these events were sent
