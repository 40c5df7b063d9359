"""Errors in OpenAI's shape."""

from typing import Any

from starlette.exceptions import HTTPException

from disaggregated_inference.errors import BadRequest, ContextTooLong, DisaggError

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_CODES = {  # names that programs look for
    "context_too_long": "context_length_exceeded",
    "unauthorized": "invalid_api_key",
    "rate_limited": "rate_limit_exceeded",
    "bad_request": None,
}
# What each API calls the fields of a chat request.
_FIELDS = {"format": "response_format"}
_RESPONSES_FIELDS = {"format": "text.format", "messages": "input"}


def error_body(error: Exception, id: str = "") -> dict[str, Any]:
    return _body(error, _FIELDS)


def responses_error_body(error: Exception, id: str = "") -> dict[str, Any]:
    return _body(error, _RESPONSES_FIELDS)


def _body(error: Exception, fields: dict[str, str]) -> dict[str, Any]:
    status = status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    message, code = _message(error)
    param = error.param if isinstance(error, BadRequest) and status == 400 else None
    if param in fields:
        message, param = fields[param] + message.removeprefix(param), fields[param]
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def status_of(error: Exception) -> int:
    if isinstance(error, HTTPException):
        return error.status_code
    return error.status if isinstance(error, DisaggError) else 500


def _message(error: Exception) -> tuple[str, str | None]:
    """Unexpected errors are for the log, not for the client."""
    if isinstance(error, ContextTooLong):
        # It begins as OpenAI's own message does: LiteLLM, and so aider, reads these words and not the code.
        total = f"prompt and completion together have {error.how_exact}{error.needed_tokens} tokens"
        message = f"This model's maximum context length is {error.window_tokens} tokens, but {total}: shorten one"
        return message, _CODES[error.code]
    if isinstance(error, DisaggError):
        return str(error), _CODES.get(error.code, error.code)
    if isinstance(error, HTTPException):
        return error.detail, None
    return "something failed inside the gateway; its log has the reason", "internal_error"
