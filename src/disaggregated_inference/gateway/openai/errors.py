"""Errors in OpenAI's shape."""

import re
from typing import Any

from starlette.exceptions import HTTPException

from disaggregated_inference.errors import ContextTooLong, DisaggError
from disaggregated_inference.gateway.openai.requests import KNOWN
from disaggregated_inference.gateway.openai.responses_requests import CreateResponse

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}

# With a colon after it: `input` and `text` are words that sentences begin with, too.
_OF_RESPONSES = frozenset(CreateResponse.__struct_fields__)

# Names that programs look for.
_CODES = {
    "context_too_long": "context_length_exceeded",
    "unauthorized": "invalid_api_key",
    "rate_limited": "rate_limit_exceeded",
    "bad_request": None,
}


def error_body(error: Exception, format_field: str = "response_format") -> dict[str, Any]:
    status = status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    message, code = _said(error)
    message = re.sub(r"^format(?=[:. ])", format_field, message)  # as nodes call it
    param = _param(message) if status == 400 else None
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def status_of(error: Exception) -> int:
    if isinstance(error, HTTPException):
        return error.status_code
    return error.status if isinstance(error, DisaggError) else 500


def _said(error: Exception) -> tuple[str, str | None]:
    """What went wrong inside is for the log, not for whoever calls."""
    if isinstance(error, DisaggError):
        return _too_long(error) or str(error), _CODES.get(error.code, error.code)
    if isinstance(error, HTTPException):
        return error.detail, None
    return "something failed inside the gateway; its log has the reason", "internal_error"


def _too_long(error: DisaggError) -> str:
    """It begins as OpenAI's own does: LiteLLM, and so aider, knows it by these words and not by the code."""
    if not isinstance(error, ContextTooLong):
        return ""
    asked = f"prompt and answer together were to have {error.how_exact}{error.needed_tokens} tokens"
    return f"This model's maximum context length is {error.window_tokens} tokens, and {asked}: shorten one of them"


def _param(message: str) -> str | None:
    """Refusals begin with the field that they are about, whoever refused: see openai_asked and nodes.sampling."""
    found = re.match(r"(([a-z_]+)[\w.\[\]]*)([: ])", message)
    if not found:
        return None
    known = found[2] in KNOWN or (found[3] == ":" and found[2] in _OF_RESPONSES)
    return found[1] if known else None
