"""What a command line says about the answers it wants, checked before anyone is asked."""

import json
from pathlib import Path
from typing import Any

import msgspec

from disaggregated_inference.errors import BadRequest


class AnswerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """None: as the config has it for the model, or else by default."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    timeout: float | None = None
    format: dict[str, Any] | None = None

    @property
    def options(self) -> dict[str, Any]:
        return msgspec.structs.asdict(self)


def format_in(path: Path) -> dict[str, Any]:
    try:
        schema = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        wanted = "name a file that has a JSON schema"
        raise BadRequest(f"--json-schema: {path} cannot be read: {error.strerror}; {wanted}") from error
    except ValueError as error:  # no JSON, or no text at all
        raise BadRequest(f"--json-schema: {path} is not JSON: {error}") from error
    return {"type": "json_schema", "schema": schema}


def messages_of(system: str, *turns: dict[str, str]) -> list[dict[str, str]]:
    return [*([{"role": "system", "content": system}] if system else []), *turns]


def checked(text: str) -> str:
    """Bytes that are no UTF-8 come from a terminal or a pipe as lone surrogates, which no tokenizer takes."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise BadRequest("this is not valid UTF-8 text")
    if not text.strip():
        raise BadRequest("the prompt is empty")
    return text
