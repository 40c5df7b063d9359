"""The HTTP layer that nodes, Ollama nodes and the gateway share."""

from disaggregated_inference.http.body import BODY_LIMIT_BYTES, read_body, read_json
from disaggregated_inference.http.limits import HttpLimits
from disaggregated_inference.http.middleware import Bearer, RequestId, request_id
from disaggregated_inference.http.responses import error_body, error_headers, error_response, json_response
from disaggregated_inference.http.server import HttpServer, is_loopback, require_free_port, write_ready_line
from disaggregated_inference.http.sse import (
    KEEPALIVE_COMMENT,
    UNBUFFERED_HEADERS,
    DescribeError,
    EventStreamResponse,
    sse_event,
    unless_disconnected,
)
from disaggregated_inference.http.tls import Certificate

__all__ = [
    "BODY_LIMIT_BYTES",
    "KEEPALIVE_COMMENT",
    "UNBUFFERED_HEADERS",
    "Bearer",
    "Certificate",
    "DescribeError",
    "EventStreamResponse",
    "HttpLimits",
    "HttpServer",
    "RequestId",
    "error_body",
    "error_headers",
    "error_response",
    "is_loopback",
    "json_response",
    "read_body",
    "read_json",
    "request_id",
    "require_free_port",
    "sse_event",
    "unless_disconnected",
    "write_ready_line",
]
