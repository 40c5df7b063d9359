"""JSON responses, and errors as nodes describe them: a code and a message."""

from typing import Any

import msgspec
from starlette.responses import Response

from disaggregated_inference.api import ErrorBody, ErrorDetail
from disaggregated_inference.errors import DisaggError


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def error_body(error: BaseException) -> ErrorBody:
    code = error.code if isinstance(error, DisaggError) else "internal_error"
    return ErrorBody(ErrorDetail(code, str(error), getattr(error, "param", None) or msgspec.UNSET))


def error_response(error: Exception, retry_after_s: float | None = None) -> Response:
    status = error.status if isinstance(error, DisaggError) else 500
    return json_response(error_body(error), status, error_headers(error, status, retry_after_s))


def error_headers(error: Exception, status: int, retry_after_s: float | None = None) -> dict[str, str]:
    """`retry_after_s`: what the server knows better than the error itself."""
    headers = {}
    if status in (429, 503):
        seconds: float = getattr(error, "retry_after_s", 1) if retry_after_s is None else retry_after_s
        headers["Retry-After"] = str(max(1, round(seconds)))
    if status == 501:
        headers["x-should-retry"] = "false"  # OpenAI's and Anthropic's clients repeat every other 5xx
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status == 408:  # the rest of the body may still arrive; it must not be read as the next request
        headers["Connection"] = "close"
    return headers
