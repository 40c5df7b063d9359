"""What an error of a node, or of the line to it, means for the leg that met it: busy, refused or failed."""

import re

import aiohttp
import msgspec

from disaggregated_inference.api import ErrorBody, ErrorDetail
from disaggregated_inference.cluster import Server
from disaggregated_inference.orchestrator.connection_errors import why_unreachable
from disaggregated_inference.orchestrator.heartbeat import StreamSilent
from disaggregated_inference.orchestrator.leg_errors import LegBusy, LegFailed, NodeRefused, refusal

WRONG_TOKEN = "unauthorized"  # the code of the error
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # of what a node sent
_REFUSED_TOKEN = "it refused the token (401): `token` in the cluster file, else DISAGG_TOKEN, is not the node's"
_NEEDS_TOKEN = "it needs a token (401): set DISAGG_TOKEN"
_SECONDS = re.compile("[0-9]{1,9}")

# Refusals that another node may not repeat: this is no node, or it was restarted as another one, or it is too small.
_NODE_CODES = frozenset({"bad_answer", "not_found", "request_damaged", "request_too_large"})
_BUSY_CODES = frozenset({"node_busy", "kv_memory_full", "queue_full"})
_REFUSAL_STATUS = {"deadline_exceeded": 504, "bad_request": 400, "context_too_long": 400}

Failure = LegBusy | LegFailed | NodeRefused


def failure_of_answer(server: Server, status: int, body: bytes, retry_after: str | None = None) -> Failure:
    try:
        detail = msgspec.json.decode(body, type=ErrorBody).error
    except UNREADABLE:
        detail = ErrorDetail("bad_answer", f"it does not answer as a node: HTTP {status}")
    if status == 401:
        return LegFailed(server.name, WRONG_TOKEN, _REFUSED_TOKEN if server.token else _NEEDS_TOKEN)
    if detail.code in _BUSY_CODES:
        wait_s = float(retry_after) if retry_after and _SECONDS.fullmatch(retry_after) else 1.0
        return LegBusy(server.name, detail.message, wait_s)
    if status in (400, 404, 413, 422, 504) and detail.code not in _NODE_CODES:
        return refusal(status, detail.code, detail.message, detail.param or None)
    return LegFailed(server.name, detail.code, detail.message)


def failure_in_stream(server: Server, detail: ErrorDetail, began: bool = False) -> Failure:
    """What it has begun to write, a node cannot refuse."""
    if detail.code in _BUSY_CODES:
        return LegBusy(server.name, detail.message, 1.0)
    if (status := _REFUSAL_STATUS.get(detail.code)) and not (began and status == 400):
        return refusal(status, detail.code, detail.message, detail.param or None)
    return LegFailed(server.name, detail.code, detail.message)


def failure_of_line(server: Server, error: Exception) -> LegFailed:
    """The node cannot be reached, or its stream is silent or broken."""
    if isinstance(error, StreamSilent):
        if error.node_alive:
            return LegFailed(server.name, "stream_ended", str(error))
        return _gone(server, str(error), timed_out=error.timed_out)
    if isinstance(error, TimeoutError):
        return _gone(server, "it does not answer", timed_out=True)
    if isinstance(error, aiohttp.ClientPayloadError):
        return _gone(server, "it broke off in the middle of its answer", connection_broke=True)
    broke = not isinstance(error, aiohttp.ClientConnectorError)
    return _gone(server, f"it cannot be reached: {why_unreachable(error, server)}", connection_broke=broke)


def _gone(server: Server, message: str, *, timed_out: bool = False, connection_broke: bool = False) -> LegFailed:
    return LegFailed(
        server.name, "unreachable", message, node_gone=True, timed_out=timed_out, connection_broke=connection_broke
    )
