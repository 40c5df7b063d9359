"""What a node makes of a request: the tokens of its prompt, its inline KV."""

import base64

from disaggregated_inference.api import DecodeRequest, PrefillRequest
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.models import ModelFiles

INLINE_LIMIT_BYTES = 64 << 20  # of KV in a request or response; base64 adds a third


def prompt_tokens(request: PrefillRequest | DecodeRequest, model: ModelFiles) -> list[int]:
    given = [name for name in ("prompt", "messages", "tokens") if getattr(request, name) is not None]
    if len(given) != 1:
        raise BadRequest(f"give exactly one of prompt, messages and tokens, not {len(given)}")
    tokens = request.tokens if request.tokens is not None else _encode(request, model)
    if not tokens:
        raise BadRequest("the prompt is empty", given[0])
    return tokens


def _encode(request: PrefillRequest | DecodeRequest, model: ModelFiles) -> list[int]:
    tokenizer = model.tokenizer
    if request.messages is not None:
        return tokenizer.encode_chat(request.messages, model.spec.context_window)
    return tokenizer.encode_within(request.prompt or "", model.spec.context_window)


def inline_kv(kv_cache: str) -> bytes:
    try:
        return base64.b64decode(kv_cache, validate=True)
    except ValueError as error:
        raise BadRequest(f"kv_cache is not base64: {error}", "kv_cache") from error
