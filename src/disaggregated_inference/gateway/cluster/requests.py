"""Requests of the gateway's own paths, with vLLM's names. Unknown fields are ignored."""

from typing import Any

import msgspec

from disaggregated_inference.api.sampling import TokenId
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.gateway.validation import without_nulls


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly one of prompt and messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def require_supported(self) -> None:
        if self.add_special_tokens:
            reason = "special tokens are never added; write them into the prompt, or leave it out"
            raise BadRequest(f"add_special_tokens: {reason}", param="add_special_tokens")
        if (self.prompt is None) == (self.messages is None):
            raise BadRequest("give exactly one of prompt and messages")

    def template(self) -> dict[str, Any]:
        return without_nulls({"tools": self.tools, "add_generation_prompt": self.add_generation_prompt})


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]
