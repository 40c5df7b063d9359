"""What nodes are asked, and how a body becomes one of these. See docs/API.md."""

import base64
import binascii
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from disaggregated_inference.errors import BadRequest, BodyTooLarge
from disaggregated_inference.models import ModelFiles

BODY_LIMIT_BYTES = 16 << 20
INLINE_LIMIT_BYTES = 64 << 20  # of KV in a request or response; base64 makes a third more of it


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt in one of three forms."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tokens: list[int] | None = None

    def to_tokens(self, model: ModelFiles) -> list[int]:
        given = [name for name in ("prompt", "messages", "tokens") if getattr(self, name) is not None]
        if len(given) != 1:
            raise BadRequest(f"give exactly one of prompt, messages and tokens, not {len(given)}")
        if self.tokens is not None:
            return self.tokens
        if self.messages is not None:
            return model.tokenizer.encode_chat(self.messages)
        return model.tokenizer.encode(self.prompt or "")


class PrefillRequest(Prompt, frozen=True, kw_only=True):
    ticket: str | None = None
    wait: bool = True  # false: answer at once, the fetch may begin before the prefill ends
    inline: bool = False  # true: the cache itself in the answer, as base64

    def require_sensible(self) -> None:
        if self.inline and not self.wait:
            raise BadRequest("inline needs the whole cache: leave out wait, or set it to true")
        if self.ticket is not None and not 0 < len(self.ticket) <= 200:
            raise BadRequest("a ticket id has 1 to 200 characters")


class DecodeRequest(Prompt, frozen=True, kw_only=True):
    context: str | None = None
    kv_cache: str | None = None
    max_new_tokens: int = 256
    temperature: float = 0.0
    stream: bool = False

    def require_supported(self) -> None:
        if self.max_new_tokens < 1:
            raise BadRequest("max_new_tokens must be at least 1")
        if self.temperature != 0:
            raise BadRequest("this node decodes greedily: leave temperature out, or set it to 0")
        if self.context is not None and self.kv_cache is not None:
            raise BadRequest("give context or kv_cache, not both")

    def tape(self) -> bytes:
        try:
            return base64.b64decode(self.kv_cache or "", validate=True)
        except binascii.Error as error:
            raise BadRequest(f"kv_cache is not base64: {error}") from error


Body = TypeVar("Body", bound=msgspec.Struct)


async def body_of(request: Request, kind: type[Body], limit_bytes: int = BODY_LIMIT_BYTES) -> Body:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit_bytes:
            raise BodyTooLarge(f"a request body of more than {limit_bytes} bytes")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise BadRequest(str(error)) from error
