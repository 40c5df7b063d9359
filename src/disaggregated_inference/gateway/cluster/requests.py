"""What our own paths are asked for, by vLLM's names. Fields nobody knows are let be."""

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from disaggregated_inference.errors import BadRequest

Kind = TypeVar("Kind", bound=msgspec.Struct)


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly one of prompt and messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def require_possible(self) -> None:
        if self.add_special_tokens:
            reason = "none are added here, to no prompt; write them into it, or leave it out"
            raise BadRequest(f"add_special_tokens: {reason}")
        if (self.prompt is None) == (self.messages is None):
            raise BadRequest("give exactly one of prompt and messages")

    def template(self) -> dict[str, Any]:
        said = {"tools": self.tools, "add_generation_prompt": self.add_generation_prompt}
        return {name: value for name, value in said.items() if value is not None}


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[Annotated[int, Meta(ge=0, le=1 << 31)]]


def read(body: dict[str, Any], kind: type[Kind]) -> Kind:
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at ")
        raise BadRequest(f"{place.strip('`').removeprefix('$.') or 'body'}: {reason}") from error
