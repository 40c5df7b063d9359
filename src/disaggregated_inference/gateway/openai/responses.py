"""OpenAI's Responses API: the routes. Responses are stored, so that a later request may continue from them."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response as HttpResponse
from starlette.routing import Route

from disaggregated_inference.api import generate_request
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.gateway.chat import ChatRequest, consume, encode_all, stream_chat
from disaggregated_inference.gateway.content_blocks import Event, encode_event
from disaggregated_inference.gateway.openai.errors import responses_error_body as error_body
from disaggregated_inference.gateway.openai.responses_output import ResponseBuilder, new_response
from disaggregated_inference.gateway.openai.responses_requests import (
    CreateResponse,
    InputItem,
    InputMessage,
    ItemReference,
    as_listed,
    chat_request,
    read,
)
from disaggregated_inference.gateway.request_context import RequestContext
from disaggregated_inference.gateway.response_store import ResponseNotFound, ResponseStore, StoredResponse
from disaggregated_inference.http import (
    EventStreamResponse,
    json_response,
    read_json,
    sse_comment,
    unless_disconnected,
)

__all__ = ["ID_HEADER", "NAME", "error_body", "owns", "routes"]

NAME, ID_HEADER = "responses", "x-request-id"
_MAX_PAGE = 100


class PreviousResponseNotFound(BadRequest):
    """400 and not 404, as OpenAI has it: the path of the request exists."""


def owns(connection: HTTPConnection) -> bool:
    path: str = connection.scope["path"]
    return path.startswith("/v1/responses")


def routes() -> list[Route]:
    responses = Responses(ResponseStore())
    one = "/v1/responses/{id}"
    return [
        Route("/v1/responses", responses.create, methods=["POST"]),
        Route(one, responses.retrieve, methods=["GET"]),
        Route(one, responses.delete, methods=["DELETE"]),
        Route(one + "/input_items", responses.input_items, methods=["GET"]),
    ]


class Responses:
    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def create(self, request: Request) -> HttpResponse:
        context, create = RequestContext(request), read(await read_json(request))
        model, prompt = context.model(create.model), self._prompt(context.caller.name, create)
        chat = chat_request(create, model, prompt, context.options(create.cache_salt))
        used = generate_request({"prompt": "", **chat.options}, context.core.config.options_of(model).defaults)
        builder = ResponseBuilder(new_response(create, context.shown_model, used))
        events = self._events(context, prompt, builder, chat)
        if not create.stream:
            await unless_disconnected(request, consume(events, lambda event: None))
            return json_response(builder.response, headers=context.headers())

        def failed(error: Exception) -> bytes:
            """A failed stream is stored too: its client knows its id."""
            last = builder.fail(error)
            self._put(context, prompt, builder)
            return b"".join(map(encode_event, last))

        def opening() -> bytes:
            return b"".join(map(encode_event, builder.opening()))

        encoded = encode_all(events, _encode)
        return EventStreamResponse(request, encoded, failed, context.headers, opening=opening)

    async def retrieve(self, request: Request) -> HttpResponse:
        if request.query_params.get("stream") == "true":
            raise BadRequest("stream: stored responses are not streamed; leave it out", param="stream")
        context = RequestContext(request)
        return json_response(self._stored(context).response, headers=context.headers())

    async def delete(self, request: Request) -> HttpResponse:
        context, id = RequestContext(request), request.path_params["id"]
        self._store.delete(context.caller.name, id)
        return json_response({"id": id, "object": "response", "deleted": True}, headers=context.headers())

    async def input_items(self, request: Request) -> HttpResponse:
        context = RequestContext(request)
        return json_response(_page(self._stored(context).prompt, request), headers=context.headers())

    def _stored(self, context: RequestContext) -> StoredResponse:
        return self._store.get(context.caller.name, context.request.path_params["id"])

    def _prompt(self, owner: str, create: CreateResponse) -> tuple[InputItem, ...]:
        """All items that the model reads, those of earlier responses included."""
        text = create.input
        items = [InputMessage(role="user", content=text)] if isinstance(text, str) else text or []
        resolved = [self._resolve(owner, item) for item in items]
        return self._earlier(owner, create.previous_response_id) + tuple(map(as_listed, resolved))

    def _earlier(self, owner: str, previous: str | None) -> tuple[InputItem, ...]:
        if previous is None:
            return ()
        try:
            stored = self._store.get(owner, previous)
        except ResponseNotFound as error:
            field = "previous_response_id"
            raise PreviousResponseNotFound(f"{field}: {error}", param=field) from error
        output: tuple[InputItem, ...] = stored.response.output
        return stored.prompt + output

    def _resolve(self, owner: str, item: InputItem | ItemReference) -> InputItem:
        if not isinstance(item, ItemReference):
            return item
        stored = (known for each in self._store.owned(owner) for known in (*each.response.output, *each.prompt))
        found: InputItem | None = next((known for known in stored if known.id == item.id), None)
        if found is None:
            raise BadRequest(f"input: no item {item.id!r} is stored; send the item itself", param="input")
        return found

    async def _events(
        self, context: RequestContext, prompt: tuple[InputItem, ...], builder: ResponseBuilder, chat: ChatRequest
    ) -> AsyncGenerator[list[Event | str], None]:
        """The response is stored before its last event is sent: a client may retrieve it from then on. A string is a
        comment."""
        async with aclosing(stream_chat(context.core, chat, context.on_plan)) as batches:
            async for deltas in batches:
                events: list[Event | str] = [delta.waiting for delta in deltas if delta.waiting]
                events += [event for delta in deltas if not delta.waiting for event in builder.take(delta)]
                if deltas[-1].record:
                    self._put(context, prompt, builder)
                yield events

    def _put(self, context: RequestContext, prompt: tuple[InputItem, ...], builder: ResponseBuilder) -> None:
        if builder.response.store:
            self._store.put(context.caller.name, builder.response.id, prompt, builder.response)


def _encode(event: Event | str) -> bytes:
    return sse_comment(event) if isinstance(event, str) else encode_event(event)


def _page(items: tuple[InputItem, ...], request: Request) -> dict[str, Any]:
    query = request.query_params
    limit, order, after = query.get("limit", "20"), query.get("order", "desc"), query.get("after")
    if not limit.isdecimal() or not 1 <= int(limit) <= _MAX_PAGE:
        raise BadRequest(f"limit must be from 1 to {_MAX_PAGE}", param="limit")
    if order not in ("asc", "desc"):
        raise BadRequest("order must be asc or desc", param="order")
    listed = list(items if order == "asc" else reversed(items))
    if after:
        places = [place for place, item in enumerate(listed) if item.id == after]
        listed = listed[places[0] + 1 :] if places else []
    page = listed[: int(limit)]
    ends = {"first_id": page[0].id, "last_id": page[-1].id} if page else {"first_id": "", "last_id": ""}
    return {"object": "list", "data": page, "has_more": len(listed) > len(page), **ends}
