"""Anthropic's Messages API: what a request may say, and the conversation that it is for a model."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from disaggregated_inference.errors import BadRequest
from disaggregated_inference.gateway.chat import ChatRequest
from disaggregated_inference.gateway.reasoning_effort import nearest
from disaggregated_inference.gateway.tool_parsers.forced_name import forced_name

Chat = dict[str, Any]  # a message as chat templates know it


class _AnthropicStruct(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that nobody knows are tolerated: `cache_control` and its like are advice to another server."""


class TextBlock(_AnthropicStruct, frozen=True, kw_only=True, tag="text"):
    text: str


class ToolUseBlock(_AnthropicStruct, frozen=True, kw_only=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(_AnthropicStruct, frozen=True, kw_only=True, tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


class ThinkingBlock(_AnthropicStruct, frozen=True, kw_only=True, tag="thinking"):
    thinking: str
    signature: str = ""  # nobody checks whose thoughts they are


class RedactedThinkingBlock(_AnthropicStruct, frozen=True, kw_only=True, tag="redacted_thinking"):
    """Another server's secret: it cannot be read here, and nothing is lost but a thought."""


class ImageBlock(_AnthropicStruct, frozen=True, kw_only=True, tag="image"):
    source: dict[str, Any]

    @property
    def data(self) -> str:
        if self.source.get("type") != "base64" or not isinstance(data := self.source.get("data"), str):
            form = '{"type": "base64", "data": ...}: nothing is fetched from here'
            raise BadRequest(f"messages: an image has a source such as {form}. Models without vision read text alone")
        return data


Block = ImageBlock | TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock


class AnthropicMessage(_AnthropicStruct, frozen=True, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    @property
    def blocks(self) -> list[Block]:
        return [TextBlock(text=self.content)] if isinstance(self.content, str) else self.content


class AnthropicTool(_AnthropicStruct, frozen=True, kw_only=True):
    type: str | None = "custom"
    name: Annotated[str, Meta(pattern=r"^[\w.:/-]{1,128}$")]
    description: str | None = None
    input_schema: dict[str, Any] | None = None

    def plain(self) -> dict[str, Any]:
        if self.type not in (None, "custom") or self.input_schema is None:
            raise BadRequest(f"tools: {self.name} needs an input_schema, and the type custom: nothing here runs others")
        described = {"description": self.description} if self.description else {}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.input_schema}}


class AnthropicToolChoice(_AnthropicStruct, frozen=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(_AnthropicStruct, frozen=True, kw_only=True):
    """A budget is tolerated: a model thinks for as long as it does, within max_tokens."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class AnthropicJsonSchema(_AnthropicStruct, frozen=True, kw_only=True, tag="json_schema"):
    schema: dict[str, Any]


class OutputConfig(_AnthropicStruct, frozen=True, kw_only=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: AnthropicJsonSchema | None = None


class CountTokensRequest(_AnthropicStruct, frozen=True, kw_only=True):
    """What a prompt is made of."""

    model: str
    messages: Annotated[list[AnthropicMessage], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice = AnthropicToolChoice(type="auto")
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig = OutputConfig()
    mcp_servers: list[Any] | None = None
    container: Any = None

    def choice(self) -> str:
        names = [tool.name for tool in self.tools or []]
        if self.tool_choice.type in ("auto", "none"):
            return self.tool_choice.type
        if not names:
            raise BadRequest("tool_choice: a tool must be used, and there are none: give tools")
        if self.tool_choice.type == "any":
            return "required"
        if self.tool_choice.name not in names:
            raise BadRequest(f"tool_choice: no tool {self.tool_choice.name!r}; there are {', '.join(names)}")
        return forced_name(self.tool_choice.name or "")

    def template(self) -> dict[str, Any]:
        """Templates know to think or not, or how hard; what one of them does not know it does not read."""
        effort, kind = self.output_config.effort, self.thinking.type if self.thinking else None
        hard = {"reasoning_effort": nearest(effort)} if effort else {}
        return hard | ({"enable_thinking": kind == "enabled"} if kind in ("enabled", "disabled") else {})

    def turn(self, model: str, **options: Any) -> ChatRequest:
        if self.mcp_servers or self.container:
            raise BadRequest("mcp_servers and container: nothing here runs tools; give them as tools, and run them")
        return ChatRequest(
            model=model,
            messages=messages_of(self.system, self.messages),
            tools=[tool.plain() for tool in self.tools or []],
            tool_choice=self.choice(),
            template=self.template(),
            options=options,
        )


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1, le=1 << 31)]
    stop_sequences: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=16)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
    stream: bool | None = None

    @property
    def must_think(self) -> bool:
        """`adaptive` leaves it to the model."""
        return self.thinking is not None and self.thinking.type == "enabled"

    def turn(self, model: str, **options: Any) -> ChatRequest:
        if self.messages[-1].role == "assistant":
            raise BadRequest("messages: the last one must be the user's; answers cannot be begun for the model here")
        asked = {name: getattr(self, name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
        shape = self.output_config.format
        grammar = {"type": "json_schema", "schema": shape.schema} if shape else None
        return super().turn(model, **options, **asked, stop=self.stop_sequences or None, format=grammar)


Kind = TypeVar("Kind", bound=CountTokensRequest)


def understood(body: dict[str, Any], kind: type[Kind]) -> Kind:
    """Null is absent."""
    try:
        return msgspec.convert({name: value for name, value in body.items() if value is not None}, kind)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at ")
        unread = "Invalid value" in reason and "messages[" in place
        remedy = (
            ": text, a user's images, and uses of tools with the text of their results are read here" if unread else ""
        )
        raise BadRequest(f"{place.strip('`').removeprefix('$.') or 'body'}: {reason}{remedy}") from error


def messages_of(system: str | list[TextBlock] | None, messages: Iterable[AnthropicMessage]) -> list[Chat]:
    told: list[Chat] = [{"role": "system", "content": _joined(system)}] if system else []
    names: dict[str, str] = {}  # of tools, by the id of their use
    for message in messages:
        if message.role == "assistant":
            names |= {block.id: block.name for block in message.blocks if isinstance(block, ToolUseBlock)}
            told.append(_assistant(message))
        else:
            told += _user(message, names)
    return told


def _assistant(message: AnthropicMessage) -> Chat:
    """One message of a template's has thoughts, text and calls, in this order."""
    if any(isinstance(block, ImageBlock) for block in message.blocks):
        raise BadRequest("messages: an image in an assistant's message; give it in a user's")
    thought = "".join(block.thinking for block in message.blocks if isinstance(block, ThinkingBlock))
    calls = [_call(block) for block in message.blocks if isinstance(block, ToolUseBlock)]
    said: Chat = {"role": "assistant", "content": _joined(message.blocks)}
    return said | ({"reasoning_content": thought} if thought else {}) | ({"tool_calls": calls} if calls else {})


def _call(block: ToolUseBlock) -> Chat:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}


def _user(message: AnthropicMessage, names: dict[str, str]) -> Iterator[Chat]:
    """Results of tools are messages of their own."""
    for is_result, blocks in groupby(message.blocks, lambda block: isinstance(block, ToolResultBlock)):
        if is_result:
            yield from (_result(block, names) for block in blocks if isinstance(block, ToolResultBlock))
        else:
            words = list(blocks)
            images = [block.data for block in words if isinstance(block, ImageBlock)]
            yield {"role": message.role, "content": _joined(words)} | ({"images": images} if images else {})


def _result(block: ToolResultBlock, names: dict[str, str]) -> Chat:
    if block.tool_use_id not in names:
        raise BadRequest(f"messages: a tool_result for {block.tool_use_id!r}, and no such tool_use before it")
    text = f"Error: {_joined(block.content)}" if block.is_error else _joined(block.content)  # templates have no flag
    return {"role": "tool", "tool_call_id": block.tool_use_id, "name": names[block.tool_use_id], "content": text}


def _joined(content: str | Iterable[Block] | None) -> str:
    if isinstance(content, str):
        return content
    return "".join(block.text for block in content or () if isinstance(block, TextBlock))
