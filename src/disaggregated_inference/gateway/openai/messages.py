"""Messages and tools of chat requests, as chat templates take them: known fields, in one order, without nulls."""

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from disaggregated_inference.errors import BadRequest

_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64", re.IGNORECASE)


class ImageURL(msgspec.Struct, frozen=True, kw_only=True):
    url: str


class ContentPart(msgspec.Struct, frozen=True, kw_only=True):
    """Of a content that comes in parts."""

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
    reasoning: str | None = None  # the same, by the name that others gave it


class Function(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: Annotated[str, Meta(pattern=r"^[\w.:/-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ChatTool(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        plain: dict[str, Any] = msgspec.to_builtins(self)
        plain["function"].setdefault("parameters", {"type": "object", "properties": {}})
        return plain


def plain_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    return [_plain(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _plain(message: ChatMessage, place: str) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,  # the one that templates know
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
        raise BadRequest(f"{place}.content: it is missing")
    if not isinstance(content, list):
        return content or ""
    return "".join(_text_of(piece, f"{place}.content[{number}]") for number, piece in enumerate(content))


def _images(message: ChatMessage, place: str) -> list[str]:
    """In base64, as an Ollama's node has them."""
    pieces = enumerate(message.content if isinstance(message.content, list) else ())
    return [_image(piece, f"{place}.content[{number}]") for number, piece in pieces if piece.type == "image_url"]


def _image(piece: ContentPart, place: str) -> str:
    head, _, data = piece.image_url.url.partition(",") if piece.image_url else ("", "", "")
    if not _DATA_URL.fullmatch(head):
        form = "data:image/png;base64,... is needed: nothing is fetched from here"
        raise BadRequest(f"{place}: an image_url such as {form}. Models without vision read text alone")
    return data


def _text_of(piece: ContentPart, place: str) -> str:
    text = piece.refusal if piece.type == "refusal" else piece.text
    if piece.type == "image_url":
        return ""
    if piece.type not in ("text", "refusal"):
        raise BadRequest(f"{place}: a part of type {piece.type[:40]!r}; text is read here, and an image_url")
    if text is None:
        raise BadRequest(f"{place}.{piece.type}: it is missing")
    return text
