"""The HTTP layer that nodes, Ollama nodes and the gateway share."""

from disaggregated_inference.http.body import BODY_LIMIT_BYTES, read_body, read_json
from disaggregated_inference.http.checksums import StreamChecksums
from disaggregated_inference.http.cross_site import require_own_site
from disaggregated_inference.http.limits import HttpLimits, Unfinished
from disaggregated_inference.http.listening import is_free, is_loopback, listen_error, require_free_port
from disaggregated_inference.http.middleware import Bearer, OwnSite, RequestId, request_id
from disaggregated_inference.http.responses import error_body, error_headers, error_response, json_response
from disaggregated_inference.http.server import Announce, HttpServer, announce_as_json
from disaggregated_inference.http.sse import (
    KEEPALIVE_COMMENT,
    UNBUFFERED_HEADERS,
    EventStreamResponse,
    sse_comment,
    sse_event,
    unless_disconnected,
)
from disaggregated_inference.http.tls import Certificate

__all__ = [
    "BODY_LIMIT_BYTES",
    "KEEPALIVE_COMMENT",
    "UNBUFFERED_HEADERS",
    "Announce",
    "Bearer",
    "Certificate",
    "EventStreamResponse",
    "HttpLimits",
    "HttpServer",
    "OwnSite",
    "RequestId",
    "StreamChecksums",
    "Unfinished",
    "announce_as_json",
    "error_body",
    "error_headers",
    "error_response",
    "is_free",
    "is_loopback",
    "json_response",
    "listen_error",
    "read_body",
    "read_json",
    "request_id",
    "require_free_port",
    "require_own_site",
    "sse_comment",
    "sse_event",
    "unless_disconnected",
]
