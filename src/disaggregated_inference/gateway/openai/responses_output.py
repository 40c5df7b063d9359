"""OpenAI's Responses API: a response while it is generated, and its events."""

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from disaggregated_inference.api import RequestRecord, SamplingParams
from disaggregated_inference.gateway.chat import ChatDelta
from disaggregated_inference.gateway.content_blocks import ContentList, Event, OpenContent
from disaggregated_inference.gateway.openai.errors import responses_error_body, status_of
from disaggregated_inference.gateway.openai.responses_requests import (
    CreateResponse,
    FunctionCall,
    FunctionTool,
    InputItem,
    InputMessage,
    OutputText,
    Reasoning,
    ReasoningConfig,
    ReasoningText,
    Status,
    TextConfig,
    new_id,
)
from disaggregated_inference.gateway.tool_parsers.base import ContentDelta, ReasoningDelta, TextDelta, ToolCallStart

_STREAM_ERRORS = {400: "invalid_prompt", 413: "invalid_prompt", 429: "rate_limit_exceeded"}
_KINDS = {  # of items: what their events are called, and how their ids begin
    TextDelta: ("output_text", "msg"),
    ReasoningDelta: ("reasoning_text", "rs"),
    ToolCallStart: ("function_call_arguments", "fc"),
}
_SAME_NAME = (
    *("instructions", "previous_response_id", "user"),
    *("max_output_tokens", "max_tool_calls"),
)


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """As clients get it, and as it is stored. It repeats the fields of its request."""

    id: str
    object: str = "response"
    created_at: int
    status: str = "in_progress"
    completed_at: int | None = None
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    model: str
    output: tuple[InputItem, ...] = ()
    usage: dict[str, Any] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[FunctionTool] = []
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = TextConfig()
    reasoning: ReasoningConfig = ReasoningConfig()
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    temperature: float
    top_p: float
    metadata: dict[str, str] = {}
    store: bool = True
    background: bool = False
    truncation: str = "disabled"
    user: str | None = None


def new_response(create: CreateResponse, model: str, used: SamplingParams) -> Response:
    """`used`: the request's sampling parameters over the model's defaults."""
    return Response(
        id=new_id("resp"),
        created_at=int(time.time()),
        model=model,
        tools=create.tools or [],
        tool_choice=create.tool_choice or "auto",
        parallel_tool_calls=create.parallel_tool_calls is not False,
        text=create.text or TextConfig(),
        reasoning=create.reasoning or ReasoningConfig(),
        metadata=create.metadata or {},
        store=create.store is not False,
        temperature=used.temperature,
        top_p=used.top_p,
        **{name: getattr(create, name) for name in _SAME_NAME},
    )


class ResponseBuilder:
    """Makes events of deltas. The first events come with the first delta, or earlier where the prompt takes long."""

    def __init__(self, response: Response) -> None:
        self.response = response
        self._content = ContentList(_OpenItem, single_call=not response.parallel_tool_calls)
        self._reasoning_tokens = self._event_count = 0

    def opening(self) -> list[Event]:
        return self._numbered(self._opening())

    def take(self, delta: ChatDelta) -> list[Event]:
        return self._numbered([*self._opening(), *self._events(delta)])

    def fail(self, error: Exception) -> list[Event]:
        """The output so far is kept, and the stream ends with the reason."""
        code = _STREAM_ERRORS.get(status_of(error), "server_error")
        message = responses_error_body(error)["error"]["message"]
        events = [*self._opening(), *self._content.close(complete=False)]
        return self._numbered([*events, self._end("failed", error={"code": code, "message": message})])

    def _opening(self) -> list[Event]:
        if self._event_count:
            return []
        return [{"type": f"response.{name}", "response": self.response} for name in ("created", "in_progress")]

    def _numbered(self, events: list[Event]) -> list[Event]:
        for event in events:
            event["sequence_number"] = self._event_count
            self._event_count += 1
        return events

    def _events(self, delta: ChatDelta) -> Iterator[Event]:
        self._reasoning_tokens += any(isinstance(piece, ReasoningDelta) for piece in delta.content)
        for piece in delta.content:
            yield from self._content.add(piece)
        if delta.finish_reason:
            yield from self._content.close(complete=delta.finish_reason != "length")
            if delta.finish_reason == "length":
                details = {"reason": "max_output_tokens"}
                self.response = msgspec.structs.replace(self.response, incomplete_details=details)
        if delta.record:
            status = "incomplete" if self.response.incomplete_details else "completed"
            yield self._end(status, usage=self._usage(delta.record))

    def _end(self, status: str, **fields: Any) -> Event:
        if status == "completed":
            fields["completed_at"] = int(time.time())
        self.response = msgspec.structs.replace(
            self.response, status=status, output=tuple(self._content.finished), **fields
        )
        return {"type": f"response.{status}", "response": self.response}

    def _usage(self, record: RequestRecord) -> dict[str, Any]:
        """A delta with reasoning counts as one reasoning token."""
        return {
            "input_tokens": record.prompt_tokens,
            "input_tokens_details": {"cached_tokens": record.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": record.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": record.total_tokens,
        }


class _OpenItem(OpenContent):
    """A message and its reasoning have one content part each; a function call has none."""

    def __init__(self, index: int, first: ContentDelta) -> None:
        super().__init__(index, first)
        self._kind, prefix = _KINDS[type(first)]
        self._id = new_id(prefix)

    def start(self) -> Iterator[Event]:
        yield self._item_event("added", "in_progress")
        if not isinstance(self.first, ToolCallStart):
            yield self._event("content_part.added", part=self._part())

    def delta(self, text: str) -> Event:
        return self._event(f"{self._kind}.delta", delta=text)

    def finish(self, complete: bool) -> Iterator[Event]:
        if isinstance(self.first, ToolCallStart):
            yield self._event(f"{self._kind}.done", name=self.first.name, arguments=self.text)
        else:
            yield self._event(f"{self._kind}.done", text=self.text)
            yield self._event("content_part.done", part=self._part())
        yield self._item_event("done", "completed" if complete else "incomplete")

    def content(self, complete: bool) -> InputItem:
        return self._item("completed" if complete else "incomplete")

    def _item(self, status: Status) -> InputItem:
        parts = [] if status == "in_progress" else [self._part()]
        if isinstance(self.first, ToolCallStart):
            call = {"call_id": self.first.id, "name": self.first.name, "arguments": self.text}
            return FunctionCall(id=self._id, status=status, **call)
        if isinstance(self.first, ReasoningDelta):
            return Reasoning(id=self._id, status=status, content=parts)
        return InputMessage(id=self._id, status=status, role="assistant", content=parts)

    def _part(self) -> Any:
        return (ReasoningText if isinstance(self.first, ReasoningDelta) else OutputText)(text=self.text)

    def _item_event(self, name: str, status: Status) -> Event:
        return {"type": f"response.output_item.{name}", "output_index": self.index, "item": self._item(status)}

    def _event(self, name: str, /, **fields: Any) -> Event:
        event: Event = {"type": f"response.{name}", "item_id": self._id, "output_index": self.index}
        if not isinstance(self.first, ToolCallStart):
            event["content_index"] = 0
        if name.startswith("output_text"):
            event["logprobs"] = []
        return event | fields
