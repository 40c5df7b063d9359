"""Messages and tools of chat requests, and their form for chat templates: known fields, in one order, no nulls."""

import re
from typing import Any, Literal

import msgspec

from disaggregated_inference.errors import BadRequest
from disaggregated_inference.gateway.tool_parsers.tools import FunctionName, function_tool

_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64", re.IGNORECASE)


class ImageURL(msgspec.Struct, frozen=True, kw_only=True):
    url: str


class ContentPart(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageURL | None = None


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: str | None = None
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name for the same


class Function(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ChatTool(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        return function_tool(self.function.name, self.function.description, self.function.parameters)


def plain_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """As chat templates read them."""
    return [_plain(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _plain(message: ChatMessage, place: str) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,  # which templates know
        "content": _text(message, place),
        "images": _images(message, place) or None,
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content or message.reasoning,
        "tool_calls": msgspec.to_builtins(message.tool_calls) or None,
    }
    return {name: value for name, value in plain.items() if value is not None}


def _text(message: ChatMessage, place: str) -> str:
    content = message.content
    if content is None and message.role != "assistant":
        raise BadRequest(f"{place}.content: it is missing", param=f"{place}.content")
    if not isinstance(content, list):
        return content or ""
    return "".join(_part_text(part, f"{place}.content[{number}]") for number, part in enumerate(content))


def _images(message: ChatMessage, place: str) -> list[str]:
    """In base64, as Ollama nodes take them."""
    parts = enumerate(message.content if isinstance(message.content, list) else ())
    return [_image(part, f"{place}.content[{number}]") for number, part in parts if part.type == "image_url"]


def _image(part: ContentPart, place: str) -> str:
    return image_data(part.image_url.url if part.image_url else "", place)


def image_data(url: str, place: str) -> str:
    """In base64. `place`: of the image in the request, for the error."""
    head, _, data = url.partition(",")
    if not _DATA_URL.fullmatch(head):
        form = "data:image/png;base64,...: the gateway downloads nothing, and models without vision read text only"
        raise BadRequest(f"{place}: image_url must be such as {form}", param=place)
    return data


def _part_text(part: ContentPart, place: str) -> str:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type == "image_url":
        return ""
    if part.type not in ("text", "refusal"):
        raise BadRequest(f"{place}: the type {part.type[:40]!r} is not supported: give text or image_url", param=place)
    if text is None:
        raise BadRequest(f"{place}.{part.type}: it is missing", param=f"{place}.{part.type}")
    return text
