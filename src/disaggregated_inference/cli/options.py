"""Generation options of the command line, checked before a node gets the request."""

import json
from pathlib import Path
from typing import Any

import msgspec

from disaggregated_inference.errors import BadRequest


class CommandOptions(msgspec.Struct, frozen=True, kw_only=True):
    """None: the model's default from the cluster file, else the general default."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    timeout: float | None = None
    format: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        return msgspec.structs.asdict(self)


def read_schema(path: Path) -> dict[str, Any]:
    try:
        schema = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        remedy = "name a file that contains a JSON schema"
        raise BadRequest(f"--json-schema: cannot read {path}: {error.strerror}; {remedy}") from error
    except ValueError as error:  # not JSON, or not text
        raise BadRequest(f"--json-schema: {path} is not JSON: {error}") from error
    return {"type": "json_schema", "schema": schema}


def chat_messages(system: str, *messages: dict[str, str]) -> list[dict[str, str]]:
    return [*([{"role": "system", "content": system}] if system else []), *messages]


def require_text(text: str) -> str:
    """Return the text. Invalid UTF-8 arrives as lone surrogates, which tokenizers reject."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise BadRequest("the prompt is not valid UTF-8 text")
    if not text.strip():
        raise BadRequest("the prompt is empty")
    return text
