"""Anthropic's Messages API: requests, and the conversation that they make for a model."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from disaggregated_inference.api import OutputFormat, RequestOptions
from disaggregated_inference.api.sampling import ClientSalt, MaxTokens, Probability, Stops, Temperature, TopK
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.gateway.chat import ChatRequest
from disaggregated_inference.gateway.reasoning_effort import nearest_effort
from disaggregated_inference.gateway.tool_parsers.tools import (
    FunctionName,
    forced_tool,
    function_call,
    function_result,
    function_tool,
    required_tool,
)
from disaggregated_inference.gateway.validation import read_request, without_nulls

Message = dict[str, Any]  # as chat templates read it


class _AnthropicStruct(msgspec.Struct, frozen=True, kw_only=True):
    """Unknown fields such as `cache_control` are ignored."""


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
    signature: str = ""  # not checked


class RedactedThinkingBlock(_AnthropicStruct, frozen=True, kw_only=True, tag="redacted_thinking"):
    """Encrypted by another server: it is left out."""


class ImageBlock(_AnthropicStruct, frozen=True, kw_only=True, tag="image"):
    source: dict[str, Any]

    @property
    def data(self) -> str:
        if self.source.get("type") != "base64" or not isinstance(data := self.source.get("data"), str):
            form = '{"type": "base64", "data": ...}: the gateway downloads nothing'
            raise BadRequest(f"messages: the source of an image must be {form}; models without vision read text only")
        return data


ContentBlock = ImageBlock | TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock


class AnthropicMessage(_AnthropicStruct, frozen=True, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]

    @property
    def blocks(self) -> list[ContentBlock]:
        return [TextBlock(text=self.content)] if isinstance(self.content, str) else self.content


class AnthropicTool(_AnthropicStruct, frozen=True, kw_only=True):
    type: str | None = "custom"
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any] | None = None

    def plain(self) -> dict[str, Any]:
        if self.type not in (None, "custom") or self.input_schema is None:
            raise BadRequest(
                f"tools: {self.name} needs an input_schema and the type custom; no other type is supported"
            )
        return function_tool(self.name, self.description, self.input_schema)


class AnthropicToolChoice(_AnthropicStruct, frozen=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(_AnthropicStruct, frozen=True, kw_only=True):
    """`budget_tokens` is ignored: a model thinks as long as it does, within max_tokens."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class AnthropicJsonSchema(_AnthropicStruct, frozen=True, kw_only=True, tag="json_schema"):
    schema: dict[str, Any]


class OutputConfig(_AnthropicStruct, frozen=True, kw_only=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: AnthropicJsonSchema | None = None


class CountTokensRequest(_AnthropicStruct, frozen=True, kw_only=True):
    """The fields that make the prompt."""

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
        return required_tool(names) if self.tool_choice.type == "any" else forced_tool(self.tool_choice.name, names)

    def template(self) -> dict[str, Any]:
        """Some templates know how much, others only whether to think. Each ignores the option that it does not know."""
        effort, kind = self.output_config.effort, self.thinking.type if self.thinking else None
        options = {"reasoning_effort": nearest_effort(effort)} if effort else {}
        return options | ({"enable_thinking": kind == "enabled"} if kind in ("enabled", "disabled") else {})

    def format(self) -> OutputFormat | None:
        schema = self.output_config.format
        return OutputFormat(type="json_schema", schema=schema.schema) if schema else None

    def chat_request(self, model: str, options: RequestOptions) -> ChatRequest:
        if self.mcp_servers or self.container:
            raise BadRequest("mcp_servers and container are not supported: give tools, and run them yourself")
        return ChatRequest(
            model=model,
            messages=messages_of(self.system, self.messages),
            tools=[tool.plain() for tool in self.tools or []],
            tool_choice=self.choice(),
            template=self.template(),
            format=self.format(),
            options=options,
        )


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    max_tokens: MaxTokens
    stop_sequences: Stops | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    stream: bool | None = None
    cache_salt: ClientSalt | None = None  # ours

    @property
    def requires_thinking(self) -> bool:
        """`adaptive` leaves it to the model."""
        return self.thinking is not None and self.thinking.type == "enabled"

    def chat_request(self, model: str, options: RequestOptions) -> ChatRequest:
        if self.messages[-1].role == "assistant":
            raise BadRequest("messages: the last one must be the user's; a completion cannot be started for the model")
        sampling: RequestOptions = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences or None,
            "progress": bool(self.stream),  # message_start has the prompt's tokens
        }
        return super().chat_request(model, options | sampling)


Kind = TypeVar("Kind", bound=CountTokensRequest)


_HINTS = {"messages[": "text, images of the user, and tool calls with the text of their results are supported"}


def read(body: dict[str, Any], kind: type[Kind]) -> Kind:
    """null = unset."""
    return read_request(without_nulls(body), kind, _HINTS)


def messages_of(system: str | list[TextBlock] | None, messages: Iterable[AnthropicMessage]) -> list[Message]:
    plain: list[Message] = [{"role": "system", "content": _text(system)}] if system else []
    names: dict[str, str] = {}  # of tools, by the id of the call
    for message in messages:
        if message.role == "assistant":
            names |= {block.id: block.name for block in message.blocks if isinstance(block, ToolUseBlock)}
            plain.append(_assistant(message))
        else:
            plain += _user(message, names)
    return plain


def _assistant(message: AnthropicMessage) -> Message:
    """For templates: one message with reasoning, text and calls."""
    if any(isinstance(block, ImageBlock) for block in message.blocks):
        raise BadRequest("messages: images belong into messages of the user, not of the assistant")
    reasoning = "".join(block.thinking for block in message.blocks if isinstance(block, ThinkingBlock))
    calls = [function_call(each.id, each.name, each.input) for each in message.blocks if isinstance(each, ToolUseBlock)]
    plain: Message = {"role": "assistant", "content": _text(message.blocks)}
    return plain | ({"reasoning_content": reasoning} if reasoning else {}) | ({"tool_calls": calls} if calls else {})


def _user(message: AnthropicMessage, names: dict[str, str]) -> Iterator[Message]:
    """For templates: each tool result is its own message."""
    for is_result, blocks in groupby(message.blocks, lambda block: isinstance(block, ToolResultBlock)):
        if is_result:
            yield from (_result(block, names) for block in blocks if isinstance(block, ToolResultBlock))
        else:
            rest = list(blocks)
            images = [block.data for block in rest if isinstance(block, ImageBlock)]
            yield {"role": message.role, "content": _text(rest)} | ({"images": images} if images else {})


def _result(block: ToolResultBlock, names: dict[str, str]) -> Message:
    text = f"Error: {_text(block.content)}" if block.is_error else _text(block.content)  # templates have no flag for it
    return function_result(block.tool_use_id, names, text, "messages")


def _text(content: str | Iterable[ContentBlock] | None) -> str:
    if isinstance(content, str):
        return content
    return "".join(block.text for block in content or () if isinstance(block, TextBlock))
