"""OpenAI's Responses API: what a request may say, and the conversation that it is for a model.

Items go in and come out in the same types, so an answer's items can be the next request's.
"""

import secrets
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec

from disaggregated_inference.errors import BadRequest
from disaggregated_inference.gateway.chat import ChatRequest
from disaggregated_inference.gateway.openai.requests import Seed, Stop, TopK
from disaggregated_inference.gateway.reasoning_effort import Effort, for_template
from disaggregated_inference.gateway.tool_parsers.forced_name import forced_name

Chat = dict[str, Any]  # as chat templates know it


class _ResponsesStruct(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that nobody knows are tolerated: the API grows faster than its servers."""


class InputText(_ResponsesStruct, frozen=True, kw_only=True, tag="input_text"):
    text: str


class OutputText(_ResponsesStruct, frozen=True, kw_only=True, tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] | None = []


class Refusal(_ResponsesStruct, frozen=True, kw_only=True, tag="refusal"):
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class ReasoningText(_ResponsesStruct, frozen=True, kw_only=True, tag="reasoning_text"):
    text: str


class SummaryText(_ResponsesStruct, frozen=True, kw_only=True, tag="summary_text"):
    text: str


Content = InputText | OutputText | Refusal
Status = Literal["in_progress", "completed", "incomplete"]


class InputMessage(_ResponsesStruct, frozen=True, kw_only=True, tag="message"):
    id: str | None = None
    status: Status | None = "completed"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Content]


class FunctionCall(_ResponsesStruct, frozen=True, kw_only=True, tag="function_call"):
    id: str | None = None
    status: Status | None = "completed"
    call_id: str
    name: str
    arguments: str


class FunctionCallOutput(_ResponsesStruct, frozen=True, kw_only=True, tag="function_call_output"):
    id: str | None = None
    status: Status | None = "completed"
    call_id: str
    output: str | list[Content]


class Reasoning(_ResponsesStruct, frozen=True, kw_only=True, tag="reasoning"):
    id: str | None = None
    status: Status | None = "completed"
    summary: list[SummaryText] = []
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None  # never ours: thoughts are not hidden here


class ItemReference(_ResponsesStruct, frozen=True, kw_only=True, tag="item_reference"):
    id: str


Item = InputMessage | FunctionCall | FunctionCallOutput | Reasoning
_PREFIXES = {InputMessage: "msg", FunctionCall: "fc", FunctionCallOutput: "fco", Reasoning: "rs"}


class FunctionTool(_ResponsesStruct, frozen=True, kw_only=True, tag="function"):
    name: Annotated[str, msgspec.Meta(pattern=r"^[\w.:/-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionToolChoice(_ResponsesStruct, frozen=True, kw_only=True, tag="function"):
    name: str


class AllowedToolsChoice(_ResponsesStruct, frozen=True, kw_only=True, tag="allowed_tools"):
    mode: Literal["auto", "required"] = "auto"
    tools: list[FunctionToolChoice]


class TextFormat(_ResponsesStruct, frozen=True, kw_only=True, tag="text"):
    pass


class JsonObjectFormat(_ResponsesStruct, frozen=True, kw_only=True, tag="json_object"):
    pass


class JsonSchemaFormat(_ResponsesStruct, frozen=True, kw_only=True, tag="json_schema"):
    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextConfig(_ResponsesStruct, frozen=True, kw_only=True):
    format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = TextFormat()
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(_ResponsesStruct, frozen=True, kw_only=True):
    effort: Effort | None = None
    summary: str | None = None


class CreateResponse(_ResponsesStruct, frozen=True, kw_only=True):
    model: str | None = None
    input: str | list[Item | ItemReference] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | FunctionToolChoice | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)] | None = None
    max_tool_calls: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: TopK | None = None  # this, seed and stop are not in OpenAI's: other servers have them
    seed: Seed | None = None
    stop: Stop | None = None
    n: int | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = None
    include: list[str] | None = None
    conversation: Any = None
    prompt: Any = None
    user: str | None = None

    @property
    def _says_nothing(self) -> bool:
        return self.input in (None, []) and not self.instructions and not self.previous_response_id

    def require_supported(self) -> None:
        for wanted, why_not in (
            (self.background, "background: nothing runs here for a client that left; stream instead"),
            (self.truncation == "auto", "truncation: prompts are never cut; leave it out, and send what fits"),
            (self.conversation, "conversation: none are kept here; use previous_response_id"),
            (self.prompt, "prompt: no prompts are kept here; send instructions and input"),
            (self.top_logprobs, "top_logprobs: not here; /v1/chat/completions has them"),
            (self.n not in (None, 1), "n: one answer to a request here; /v1/chat/completions has more"),
            (self._says_nothing, "input: it is empty; give a text, or at least one item"),
            (_LOGPROBS in (self.include or ()), f"include: no {_LOGPROBS} here; /v1/chat/completions has logprobs"),
        ):
            if wanted:
                raise BadRequest(why_not)


_LOGPROBS = "message.output_text.logprobs"


def understood(body: dict[str, Any]) -> CreateResponse:
    """Messages may come without their type."""
    items = body.get("input")
    if isinstance(items, list):
        body = body | {"input": [_typed(item) for item in items]}
    try:
        create = msgspec.convert(body, CreateResponse)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at ")
        raise BadRequest(f"{place.strip('`').removeprefix('$.') or 'body'}: {reason}{_remedy(str(error))}") from error
    create.require_supported()
    return create


def _typed(item: Any) -> Any:
    untyped = isinstance(item, dict) and "role" in item and item.get("type") is None
    return item | {"type": "message"} if untyped else item


def _remedy(error: str) -> str:
    if "Invalid value" not in error:
        return ""
    if "`$.tools[" in error or "`$.tool_choice" in error:
        return ": tools of type function can be used, nothing here runs any other"
    return ": text, calls of functions and their outputs are read here" if "`$.input" in error else ""


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def named(item: Item) -> Item:
    """As it is listed: with an id, and its text in parts."""
    item = msgspec.structs.replace(item, id=item.id or new_id(_PREFIXES[type(item)]), status=item.status or "completed")
    if isinstance(item, InputMessage) and isinstance(item.content, str):
        part = OutputText if item.role == "assistant" else InputText
        item = msgspec.structs.replace(item, content=[part(text=item.content)])
    return item


def turn_of(create: CreateResponse, model: str, items: Iterable[Item], options: dict[str, Any]) -> ChatRequest:
    tools, choice = _tools(create)
    asked = {name: getattr(create, name) for name in ("temperature", "top_p", "seed", "stop")}
    asked |= {"max_tokens": create.max_output_tokens, "top_k": 0 if create.top_k == -1 else create.top_k}
    return ChatRequest(
        model=model,
        messages=messages_of(create.instructions, items),
        tools=[_tool(tool) for tool in tools],
        tool_choice=choice,
        template=_template(create),
        options=options | asked | {"format": _format(create.text)},
    )


def _tools(create: CreateResponse) -> tuple[list[FunctionTool], str]:
    """Those that may be used, and whether one must be."""
    tools, choice = create.tools or [], create.tool_choice or "auto"
    if isinstance(choice, AllowedToolsChoice):
        allowed = {tool.name for tool in choice.tools}
        tools, choice = [tool for tool in tools if tool.name in allowed], choice.mode
    names = {tool.name for tool in tools}
    if isinstance(choice, FunctionToolChoice):
        if choice.name not in names:
            raise BadRequest(f"tool_choice: no {choice.name!r} among tools; there are {', '.join(names) or 'none'}")
        return tools, forced_name(choice.name)
    if choice == "required" and not tools:
        raise BadRequest("tool_choice: a call is required, and there are no tools")
    return tools, choice


def _tool(tool: FunctionTool) -> dict[str, Any]:
    described = {"description": tool.description} if tool.description else {}
    parameters = tool.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": parameters}}


def _template(create: CreateResponse) -> dict[str, Any]:
    effort = create.reasoning.effort if create.reasoning else None
    verbosity = create.text.verbosity if create.text else None
    return for_template(effort) | ({"verbosity": verbosity} if verbosity else {})


def _format(asked: TextConfig | None) -> dict[str, Any] | None:
    match asked.format if asked else None:
        case JsonSchemaFormat(schema=schema):
            return {"type": "json_schema", "schema": schema}
        case JsonObjectFormat():
            return {"type": "json_object"}
    return None


def messages_of(instructions: str | None, items: Iterable[Item]) -> list[Chat]:
    told: list[Chat] = [{"role": "system", "content": instructions}] if instructions else []
    names: dict[str, str] = {}  # of calls
    for item in items:
        match item:
            case FunctionCall():
                names[item.call_id] = item.name
                _assistant(told, "tool_calls").setdefault("tool_calls", []).append(_call(item))
            case FunctionCallOutput():
                told.append(_output(item, names))
            case Reasoning():
                _assistant(told, "reasoning_content")["reasoning_content"] = _thought(item)
            case InputMessage(role="assistant"):
                _assistant(told, "content")["content"] = _text(item.content)
            case InputMessage(role="user"):
                told.append({"role": "user", "content": _text(item.content)})
            case InputMessage():
                _instruct(told, _text(item.content))
    return told


# A model's thought, text and calls are items of their own here, and one message for a template: what is not free in the
# last message begins the next one.
_TAKES = {
    "reasoning_content": ("reasoning_content", "content", "tool_calls"),
    "content": ("content",),
    "tool_calls": (),
}


def _assistant(told: list[Chat], what: str) -> Chat:
    if not told or told[-1]["role"] != "assistant" or any(told[-1].get(name) for name in _TAKES[what]):
        told.append({"role": "assistant", "content": ""})
    return told[-1]


def _instruct(told: list[Chat], text: str) -> None:
    """Developers' words are the system's to most templates; some read one such message, so neighbours are joined."""
    if told and told[-1]["role"] == "system":
        told[-1] = {"role": "system", "content": f"{told[-1]['content']}\n\n{text}"}
    else:
        told.append({"role": "system", "content": text})


def _call(item: FunctionCall) -> Chat:
    return {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}


def _output(item: FunctionCallOutput, names: dict[str, str]) -> Chat:
    if item.call_id not in names:
        raise BadRequest(f"input: an output of the call {item.call_id!r}, and no such call before it")
    return {"role": "tool", "tool_call_id": item.call_id, "name": names[item.call_id], "content": _text(item.output)}


def _thought(item: Reasoning) -> str:
    return "".join(part.text for part in item.content or item.summary)


def _text(content: str | list[Content]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
