"""Errors in OpenAI's shape."""

import re
from typing import Any

from starlette.exceptions import HTTPException

from disaggregated_inference.errors import DisaggError
from disaggregated_inference.gateway.adapters.openai_asked import KNOWN

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}

# Names that programs look for.
_CODES = {
    "context_too_long": "context_length_exceeded",
    "unauthorized": "invalid_api_key",
    "rate_limited": "rate_limit_exceeded",
    "bad_request": None,
}


def error_body(error: Exception) -> dict[str, Any]:
    status = status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    message, code = _said(error)
    param = _param(message) if status == 400 else None
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def status_of(error: Exception) -> int:
    if isinstance(error, HTTPException):
        return error.status_code
    return error.status if isinstance(error, DisaggError) else 500


def _said(error: Exception) -> tuple[str, str | None]:
    """What went wrong inside is for the log, not for whoever calls."""
    if isinstance(error, DisaggError):
        return str(error), _CODES.get(error.code, error.code)
    if isinstance(error, HTTPException):
        return error.detail, None
    return "something failed inside the gateway; its log has the reason", "internal_error"


def _param(message: str) -> str | None:
    """Refusals begin with the field that they are about, whoever refused: see openai_asked and nodes.sampling."""
    found = re.match(r"([a-z_]+)([\w.\[\]]*)(?=[: ])", message)
    if found and found[1] == "format":
        return "response_format"
    return found[0] if found and found[1] in KNOWN else None
