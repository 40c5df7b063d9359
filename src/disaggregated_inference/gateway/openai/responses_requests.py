"""OpenAI's Responses API: requests, and the conversation that they make for a model.

Input and output items have the same types, so the output of one response can be the input of the next.
"""

import secrets
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from disaggregated_inference.api import OutputFormat, RequestOptions
from disaggregated_inference.api.sampling import ClientSalt, MaxTokens, Probability, Seed, Temperature
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.gateway.chat import ChatRequest
from disaggregated_inference.gateway.openai.messages import image_data
from disaggregated_inference.gateway.openai.requests import OpenAITopK, Stop
from disaggregated_inference.gateway.reasoning_effort import Effort, template_options
from disaggregated_inference.gateway.tool_parsers.tools import (
    FunctionName,
    forced_tool,
    function_call,
    function_result,
    function_tool,
    required_tool,
)
from disaggregated_inference.gateway.validation import read_request

Message = dict[str, Any]  # as chat templates read it


class _ResponsesStruct(msgspec.Struct, frozen=True, kw_only=True):
    """Unknown fields are ignored: the API grows faster than its servers."""


class InputText(_ResponsesStruct, frozen=True, kw_only=True, tag="input_text"):
    text: str


class InputImage(_ResponsesStruct, frozen=True, kw_only=True, tag="input_image"):
    image_url: str | None = None
    file_id: str | None = None
    detail: str | None = "auto"


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


Content = InputText | InputImage | OutputText | Refusal
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
    encrypted_content: str | None = None  # not used: reasoning is not encrypted here


class ItemReference(_ResponsesStruct, frozen=True, kw_only=True, tag="item_reference"):
    id: str


InputItem = InputMessage | FunctionCall | FunctionCallOutput | Reasoning
_PREFIXES = {InputMessage: "msg", FunctionCall: "fc", FunctionCallOutput: "fco", Reasoning: "rs"}


class FunctionTool(_ResponsesStruct, frozen=True, kw_only=True, tag="function"):
    name: FunctionName
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
    input: str | list[InputItem | ItemReference] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | FunctionToolChoice | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    max_output_tokens: MaxTokens | None = None
    max_tool_calls: int | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: OpenAITopK | None = None  # top_k, seed and stop are not OpenAI's; other servers have them
    seed: Seed | None = None
    stop: Stop | None = None
    cache_salt: ClientSalt | None = None  # vLLM's
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

    def require_supported(self) -> None:
        empty = self.input in (None, []) and not self.instructions and not self.previous_response_id
        for refused, field, reason in (
            (self.background, "background", "requests do not run without their client; stream instead"),
            (self.truncation == "auto", "truncation", "prompts are never cut; leave it out, and send what fits"),
            (self.conversation, "conversation", "conversations are not stored; use previous_response_id"),
            (self.prompt, "prompt", "prompts are not stored; send instructions and input"),
            (self.top_logprobs, "top_logprobs", "not supported here; /v1/chat/completions has them"),
            (self.n not in (None, 1), "n", "one response per request; /v1/chat/completions has several choices"),
            (empty, "input", "it is empty; give a text, or at least one item"),
            (_LOGPROBS in (self.include or ()), "include", f"no {_LOGPROBS} here; /v1/chat/completions has logprobs"),
        ):
            if refused:
                raise BadRequest(f"{field}: {reason}", param=field)


_LOGPROBS = "message.output_text.logprobs"
_ONLY_FUNCTIONS = "only tools of type function are supported"
_HINTS = {
    "tools[": _ONLY_FUNCTIONS,
    "tool_choice": _ONLY_FUNCTIONS,
    "input": "text, images, function calls and their outputs are supported",
}


def read(body: dict[str, Any]) -> CreateResponse:
    """Messages may come without their type."""
    items = body.get("input")
    if isinstance(items, list):
        body = body | {"input": [_with_type(item) for item in items]}
    create = read_request(body, CreateResponse, _HINTS)
    create.require_supported()
    return create


def _with_type(item: Any) -> Any:
    untyped = isinstance(item, dict) and "role" in item and item.get("type") is None
    return item | {"type": "message"} if untyped else item


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def as_listed(item: InputItem) -> InputItem:
    """With an id, and its text in parts."""
    item = msgspec.structs.replace(item, id=item.id or new_id(_PREFIXES[type(item)]), status=item.status or "completed")
    if isinstance(item, InputMessage) and isinstance(item.content, str):
        part = OutputText if item.role == "assistant" else InputText
        item = msgspec.structs.replace(item, content=[part(text=item.content)])
    return item


def chat_request(
    create: CreateResponse, model: str, items: Iterable[InputItem], options: RequestOptions
) -> ChatRequest:
    tools, choice = _tools(create)
    sampling: RequestOptions = {
        "max_tokens": create.max_output_tokens,
        "temperature": create.temperature,
        "top_p": create.top_p,
        "top_k": 0 if create.top_k == -1 else create.top_k,
        "seed": create.seed,
        "stop": create.stop,
    }
    return ChatRequest(
        model=model,
        messages=messages_of(create.instructions, items),
        tools=[function_tool(tool.name, tool.description, tool.parameters or None) for tool in tools],
        tool_choice=choice,
        template=_template(create),
        format=_format(create.text),
        options=options | sampling,
    )


def _tools(create: CreateResponse) -> tuple[list[FunctionTool], str]:
    """The tools that may be called, and auto, none, required or the name of one."""
    tools, choice = create.tools or [], create.tool_choice or "auto"
    if isinstance(choice, AllowedToolsChoice):
        allowed = {tool.name for tool in choice.tools}
        tools, choice = [tool for tool in tools if tool.name in allowed], choice.mode
    names = [tool.name for tool in tools]
    if isinstance(choice, FunctionToolChoice):
        return tools, forced_tool(choice.name, names)
    return tools, required_tool(names) if choice == "required" else choice


def _template(create: CreateResponse) -> dict[str, Any]:
    effort = create.reasoning.effort if create.reasoning else None
    verbosity = create.text.verbosity if create.text else None
    return template_options(effort) | ({"verbosity": verbosity} if verbosity else {})


def _format(text: TextConfig | None) -> OutputFormat | None:
    match text.format if text else None:
        case JsonSchemaFormat(schema=schema):
            return OutputFormat(type="json_schema", schema=schema)
        case JsonObjectFormat():
            return OutputFormat(type="json_object")
    return None


def messages_of(instructions: str | None, items: Iterable[InputItem]) -> list[Message]:
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    names: dict[str, str] = {}  # of functions, by call id
    for item in items:
        match item:
            case FunctionCall():
                names[item.call_id] = item.name
                call = function_call(item.call_id, item.name, item.arguments)
                _assistant(messages, "tool_calls").setdefault("tool_calls", []).append(call)
            case FunctionCallOutput():
                messages.append(function_result(item.call_id, names, _text(item.output), "input"))
            case Reasoning():
                _assistant(messages, "reasoning_content")["reasoning_content"] = _text(item.content or item.summary)
            case InputMessage(role="assistant"):
                _assistant(messages, "content")["content"] = _text(item.content)
            case InputMessage(role="user"):
                messages.append(_user(item.content))
            case InputMessage():
                _add_system(messages, _text(item.content))
    return messages


# Reasoning, text and calls are separate items here, and one message for a template. An item starts a new message where
# the last one already has one of these fields.
_STARTS_NEW = {
    "reasoning_content": ("reasoning_content", "content", "tool_calls"),
    "content": ("content",),
    "tool_calls": (),
}


def _assistant(messages: list[Message], field: str) -> Message:
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(last.get(name) for name in _STARTS_NEW[field]):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _add_system(messages: list[Message], text: str) -> None:
    """Templates know the system role; some of them read one such message only, so neighbours are joined."""
    if messages and messages[-1]["role"] == "system":
        messages[-1] = {"role": "system", "content": f"{messages[-1]['content']}\n\n{text}"}
    else:
        messages.append({"role": "system", "content": text})


def _user(content: str | list[Content]) -> Message:
    """Images in base64, as Ollama nodes take them."""
    if isinstance(content, str):
        return {"role": "user", "content": content}
    images = [_image(part) for part in content if isinstance(part, InputImage)]
    text = _text([part for part in content if not isinstance(part, InputImage)])
    return {"role": "user", "content": text} | ({"images": images} if images else {})


def _image(part: InputImage) -> str:
    if part.file_id:
        raise BadRequest("input: files are not stored; give image_url: data:image/png;base64,...", param="input")
    return image_data(part.image_url or "", "input")


def _text(content: str | Sequence[Content | ReasoningText | SummaryText]) -> str:
    if isinstance(content, str):
        return content
    texts = [part.text for part in content if not isinstance(part, InputImage)]
    if len(texts) < len(content):
        raise BadRequest("input: images belong into messages of the user", param="input")
    return "".join(texts)
