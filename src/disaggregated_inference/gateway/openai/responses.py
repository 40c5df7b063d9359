"""OpenAI's Responses API: answers as a list of items, told event by event, kept so that the next request may go on."""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.routing import Route

from disaggregated_inference.errors import BadRequest, DisaggError
from disaggregated_inference.gateway.chat import ChatDelta, ChatRequest, converse
from disaggregated_inference.gateway.openai import errors as openai_errors
from disaggregated_inference.gateway.openai import responses_requests as shapes
from disaggregated_inference.gateway.openai.responses_requests import CreateResponse, Item, new_id
from disaggregated_inference.gateway.request_context import RequestContext
from disaggregated_inference.gateway.response_store import ResponseNotFound, ResponseStore, StoredResponse
from disaggregated_inference.gateway.tool_parsers.base import (
    ContentDelta,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from disaggregated_inference.http.sse import Describe, body_of, json_response, streamed, unless_gone

log = logging.getLogger(__name__)

Event = dict[str, Any]

_MOST_LISTED = 100
_CODES = {400: "invalid_prompt", 413: "invalid_prompt", 429: "rate_limit_exceeded"}  # of streams that fail


def error_body(error: Exception) -> dict[str, Any]:
    return openai_errors.error_body(error, "text.format")


class PreviousResponseNotFound(BadRequest):
    """The request is at fault, not its address: 400, as OpenAI has it."""


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """As clients get it, and as it is kept. What was asked for is told back as it was asked."""

    id: str
    object: str = "response"
    created_at: int
    status: str = "in_progress"
    completed_at: int | None = None
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    model: str
    output: tuple[Item, ...] = ()
    usage: dict[str, Any] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[shapes.FunctionTool] = []
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    text: shapes.TextConfig = shapes.TextConfig()
    reasoning: shapes.ReasoningConfig = shapes.ReasoningConfig()
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    metadata: dict[str, str] = {}
    store: bool = True
    background: bool = False
    truncation: str = "disabled"
    user: str | None = None


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
        call, create = RequestContext(request), shapes.understood(await body_of(request))
        model, read = call.model(create.model), self._read(call.caller.name, create)
        answer = ResponseBuilder(_begun(create, create.model or model))
        events = self._events(call, read, answer, shapes.turn_of(create, model, read, call.options()))
        if create.stream:
            failed = self._failure(call, read, answer)
            return await streamed(
                request, _lines(events), failed, call.headers, opening=lambda: _told(answer.opening())
            )
        await unless_gone(request, _exhausted(events))
        return json_response(answer.response, headers=call.headers())

    async def retrieve(self, request: Request) -> HttpResponse:
        if request.query_params.get("stream") == "true":
            raise BadRequest("stream: what is kept is whole; leave it out")
        call = RequestContext(request)
        return json_response(self._kept(call).response, headers=call.headers())

    async def delete(self, request: Request) -> HttpResponse:
        call, name = RequestContext(request), request.path_params["id"]
        self._store.delete(call.caller.name, name)
        return json_response({"id": name, "object": "response", "deleted": True}, headers=call.headers())

    async def input_items(self, request: Request) -> HttpResponse:
        call = RequestContext(request)
        return json_response(_page(self._kept(call).read, request), headers=call.headers())

    def _kept(self, call: RequestContext) -> StoredResponse:
        return self._store.get(call.caller.name, call.request.path_params["id"])

    def _read(self, owner: str, create: CreateResponse) -> tuple[Item, ...]:
        """Everything that the model is to read, from the first turn on."""
        said = (
            [shapes.InputMessage(role="user", content=create.input)] if isinstance(create.input, str) else create.input
        )
        items = [self._found(owner, item) for item in said or []]
        return self._before(owner, create.previous_response_id) + tuple(map(shapes.named, items))

    def _before(self, owner: str, previous: str | None) -> tuple[Item, ...]:
        if previous is None:
            return ()
        try:
            kept = self._store.get(owner, previous)
        except ResponseNotFound as error:
            raise PreviousResponseNotFound(f"previous_response_id: {error}") from error
        output: tuple[Item, ...] = kept.response.output
        return kept.read + output

    def _found(self, owner: str, item: Item | shapes.ItemReference) -> Item:
        if not isinstance(item, shapes.ItemReference):
            return item
        kept = (known for kept in self._store.owned(owner) for known in (*kept.response.output, *kept.read))
        found: Item | None = next((known for known in kept if known.id == item.id), None)
        if found is None:
            raise BadRequest(f"input: no item {item.id!r} is kept here; send the item itself")
        return found

    async def _events(
        self, call: RequestContext, read: tuple[Item, ...], answer: "ResponseBuilder", turn: ChatRequest
    ) -> AsyncGenerator[list[Event], None]:
        """Kept before its end is told: whoever knows of it can ask for it."""
        async with aclosing(converse(call.core, turn)) as batches:
            async for parts in batches:
                events = [event for part in parts for event in answer.take(part)]
                if parts[-1].metrics is not None:
                    self._keep(call, read, answer)
                yield events

    def _failure(self, call: RequestContext, read: tuple[Item, ...], answer: "ResponseBuilder") -> Describe:
        """Of a stream: its client knows its name, and may ask what became of it."""

        def failed(error: Exception) -> bytes:
            events = answer.failed(error)
            self._keep(call, read, answer)
            return _told(events)

        return failed

    def _keep(self, call: RequestContext, read: tuple[Item, ...], answer: "ResponseBuilder") -> None:
        if answer.response.store:
            self._store.put(call.caller.name, answer.response.id, read, answer.response)


def _begun(create: CreateResponse, model: str) -> Response:
    limits = ("max_output_tokens", "max_tool_calls", "temperature", "top_p")
    return Response(
        id=new_id("resp"),
        created_at=int(time.time()),
        model=model,
        tools=create.tools or [],
        tool_choice=create.tool_choice or "auto",
        parallel_tool_calls=create.parallel_tool_calls is not False,
        text=create.text or shapes.TextConfig(),
        reasoning=create.reasoning or shapes.ReasoningConfig(),
        metadata=create.metadata or {},
        store=create.store is not False,
        **{name: getattr(create, name) for name in ("instructions", "previous_response_id", "user", *limits)},
    )


def _page(items: tuple[Item, ...], request: Request) -> dict[str, Any]:
    asked = request.query_params
    limit, order, after = asked.get("limit", "20"), asked.get("order", "desc"), asked.get("after")
    if not limit.isdecimal() or not 1 <= int(limit) <= _MOST_LISTED or order not in ("asc", "desc"):
        raise BadRequest(f"limit is from 1 to {_MOST_LISTED}, order asc or desc")
    listed = list(items if order == "asc" else reversed(items))
    if after:
        places = [place for place, item in enumerate(listed) if item.id == after]
        listed = listed[places[0] + 1 :] if places else []
    page = listed[: int(limit)]
    ends = {"first_id": page[0].id, "last_id": page[-1].id} if page else {"first_id": "", "last_id": ""}
    return {"object": "list", "data": page, "has_more": len(listed) > len(page), **ends}


async def _exhausted(events: AsyncGenerator[list[Event], None]) -> None:
    async with aclosing(events):
        async for _ in events:
            pass


async def _lines(events: AsyncGenerator[list[Event], None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        async for some in events:
            if some:
                yield _told(some)


def _told(events: list[Event]) -> bytes:
    return b"".join(
        b"event: %s\ndata: %s\n\n" % (event["type"].encode(), msgspec.json.encode(event)) for event in events
    )


class ResponseBuilder:
    """A response while it is written. It begins with its first part, or before it where that takes long."""

    def __init__(self, response: Response) -> None:
        self.response = response
        self._open: _OpenItem | None = None
        self._output: list[Item] = []
        self._thoughts = self._events = 0

    def opening(self) -> list[Event]:
        return self._numbered(self._opening())

    def take(self, part: ChatDelta) -> list[Event]:
        return self._numbered([*self._opening(), *self._taken(part)])

    def failed(self, error: Exception) -> list[Event]:
        """Whatever happened: what was said is told as far as it came, and the stream ends with its reason."""
        if not isinstance(error, DisaggError):
            log.error("a response failed", exc_info=error)
        code, message = (
            _CODES.get(openai_errors.status_of(error), "server_error"),
            error_body(error)["error"]["message"],
        )
        told = [*self._opening(), *self._close("incomplete")]
        return self._numbered([*told, self._end("failed", error={"code": code, "message": message})])

    def _opening(self) -> list[Event]:
        if self._events:
            return []
        return [{"type": f"response.{what}", "response": self.response} for what in ("created", "in_progress")]

    def _numbered(self, events: list[Event]) -> list[Event]:
        for event in events:
            event["sequence_number"] = self._events
            self._events += 1
        return events

    def _taken(self, part: ChatDelta) -> Iterator[Event]:
        self._thoughts += any(isinstance(said, ReasoningDelta) for said in part.said)
        for said in part.said:
            yield from self._say(said)
        if part.finish_reason:
            yield from self._close("incomplete" if part.finish_reason == "length" else "completed")
            if part.finish_reason == "length":
                details = {"reason": "max_output_tokens"}
                self.response = msgspec.structs.replace(self.response, incomplete_details=details)
        if part.metrics is not None:
            status = "incomplete" if self.response.incomplete_details else "completed"
            yield self._end(status, usage=self._usage(part.metrics))

    def _say(self, said: ContentDelta) -> Iterator[Event]:
        if isinstance(said, ToolCallStart | ToolCallArguments) and said.index and not self.response.parallel_tool_calls:
            return  # one call was asked for; a model may begin a second one all the same
        if not (self._open and self._open.takes(said)):
            yield from self._close("completed")
            self._open = _OPENS[type(said)](len(self._output), said)
            yield from self._open.begun()
        if not isinstance(said, ToolCallStart):
            yield self._open.more(said.text)

    def _close(self, status: shapes.Status) -> Iterator[Event]:
        if self._open:
            yield from self._open.done(status)
            self._output.append(self._open.item(status))
            self._open = None

    def _end(self, status: str, **more: Any) -> Event:
        if status == "completed":
            more["completed_at"] = int(time.time())
        self.response = msgspec.structs.replace(self.response, status=status, output=tuple(self._output), **more)
        return {"type": f"response.{status}", "response": self.response}

    def _usage(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Tokens that brought a thought are the thoughts' tokens."""
        return {
            "input_tokens": metrics["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": metrics["cached_tokens"], "cache_write_tokens": 0},
            "output_tokens": metrics["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._thoughts},
            "total_tokens": metrics["total_tokens"],
        }


class _OpenItem(ABC):
    """An item that is being written."""

    kind, prefix = "", ""

    def __init__(self, place: int, said: ContentDelta) -> None:
        self.said, self.id = said, new_id(self.prefix)
        self._place, self._pieces = place, [""]

    @property
    def whole(self) -> str:
        return "".join(self._pieces)

    def takes(self, said: ContentDelta) -> bool:
        return type(said) is type(self.said)

    @abstractmethod
    def item(self, status: shapes.Status) -> Item: ...

    def begun(self) -> Iterator[Event]:
        yield {"type": "response.output_item.added", "output_index": self._place, "item": self.item("in_progress")}

    def more(self, text: str) -> Event:
        self._pieces.append(text)
        return self._at(f"{self.kind}.delta", delta=text)

    def done(self, status: shapes.Status) -> Iterator[Event]:
        yield {"type": "response.output_item.done", "output_index": self._place, "item": self.item(status)}

    def _at(self, what: str, **more: Any) -> Event:
        return {"type": f"response.{what}", "item_id": self.id, "output_index": self._place, **more}


class _TextItem(_OpenItem):
    """Its text is one part of it."""

    @abstractmethod
    def part(self) -> Any: ...

    def begun(self) -> Iterator[Event]:
        yield from super().begun()
        yield self._at("content_part.added", part=self.part())

    def done(self, status: shapes.Status) -> Iterator[Event]:
        yield self._at(f"{self.kind}.done", text=self.whole)
        yield self._at("content_part.done", part=self.part())
        yield from super().done(status)

    def _at(self, what: str, **more: Any) -> Event:
        return super()._at(what, content_index=0, **more)


class _MessageItem(_TextItem):
    kind, prefix = "output_text", "msg"

    def part(self) -> shapes.OutputText:
        return shapes.OutputText(text=self.whole)

    def item(self, status: shapes.Status) -> Item:
        content: list[shapes.Content] = [] if status == "in_progress" else [self.part()]
        return shapes.InputMessage(id=self.id, status=status, role="assistant", content=content)

    def _at(self, what: str, **more: Any) -> Event:
        return super()._at(what, logprobs=[], **more) if what.startswith(self.kind) else super()._at(what, **more)


class _ReasoningItem(_TextItem):
    kind, prefix = "reasoning_text", "rs"

    def part(self) -> shapes.ReasoningText:
        return shapes.ReasoningText(text=self.whole)

    def item(self, status: shapes.Status) -> Item:
        content = [] if status == "in_progress" else [self.part()]
        return shapes.Reasoning(id=self.id, status=status, content=content)


class _FunctionCallItem(_OpenItem):
    kind, prefix = "function_call_arguments", "fc"

    def takes(self, said: ContentDelta) -> bool:
        return isinstance(said, ToolCallArguments)

    def item(self, status: shapes.Status) -> Item:
        assert isinstance(self.said, ToolCallStart)
        return shapes.FunctionCall(
            id=self.id, status=status, call_id=self.said.id, name=self.said.name, arguments=self.whole
        )

    def done(self, status: shapes.Status) -> Iterator[Event]:
        assert isinstance(self.said, ToolCallStart)
        yield self._at(f"{self.kind}.done", name=self.said.name, arguments=self.whole)
        yield from super().done(status)


_OPENS: dict[type, type[_OpenItem]] = {
    TextDelta: _MessageItem,
    ReasoningDelta: _ReasoningItem,
    ToolCallStart: _FunctionCallItem,
}
