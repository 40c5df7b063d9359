"""From a model's text to a struct. What cannot be read is an `AnswerUnreadable`, never a guess."""

from typing import Any, TypeVar

import msgspec

from grader.errors import GraderError

Kind = TypeVar("Kind")


class AnswerUnreadable(GraderError):
    """The model's answer is not the JSON that was asked for."""


def read_answer(text: str, kind: type[Kind]) -> Kind:
    """The JSON object in the text. Some models write a thought or a fence before it."""
    start, end = text.find("{"), text.rfind("}")
    if start < 0 or end < start:
        raise AnswerUnreadable(f"the model's answer has no JSON object: {text[:80]!r}")
    try:
        return msgspec.json.decode(text[start : end + 1], type=kind)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise AnswerUnreadable(f"the model's answer cannot be read: {error}") from None


def text_field(longest: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": longest}


def choice_field(*choices: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(choices)}


def object_of(**fields: dict[str, Any]) -> dict[str, Any]:
    """All fields are needed, none besides them, in this order."""
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def list_of(field: dict[str, Any], fewest: int, most: int) -> dict[str, Any]:
    return {"type": "array", "items": field, "minItems": fewest, "maxItems": most}
