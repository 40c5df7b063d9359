"""Errors in Anthropic's shape."""

from typing import Any

from starlette.exceptions import HTTPException

from disaggregated_inference.errors import ContextTooLong, DisaggError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: Exception, id: str = "") -> dict[str, Any]:
    status = error.status if isinstance(error, DisaggError) else getattr(error, "status_code", 500)
    kind = _TYPES.get(status, "invalid_request_error" if 400 <= status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": _message(error)}, "request_id": id or None}


def _message(error: Exception) -> str:
    """Clients shorten the prompt when they read "prompt is too long". Unexpected errors are for the log only."""
    if isinstance(error, ContextTooLong):
        needed = f"{error.how_exact}{error.needed_tokens} tokens with max_tokens"
        return f"prompt is too long: {needed} > {error.window_tokens} maximum"
    if isinstance(error, HTTPException):
        return error.detail
    return str(error) if isinstance(error, DisaggError) else "internal error"
