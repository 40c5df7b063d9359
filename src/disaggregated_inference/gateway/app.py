"""The gateway as one ASGI app: adapters' routes behind keys, with errors in each API's own shape."""

import logging
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from disaggregated_inference.errors import BadRequest, Cancelled, DisaggError
from disaggregated_inference.gateway import openapi
from disaggregated_inference.gateway.anthropic import routes as anthropic
from disaggregated_inference.gateway.auth import AuthMiddleware, Keys
from disaggregated_inference.gateway.cluster import routes as cluster
from disaggregated_inference.gateway.ollama import routes as ollama
from disaggregated_inference.gateway.openai import responses
from disaggregated_inference.gateway.openai import routes as openai
from disaggregated_inference.http.deadlines import READ_S, BodyDeadline
from disaggregated_inference.http.request_id import request_id_of
from disaggregated_inference.http.sse import json_response
from disaggregated_inference.orchestrator import DisaggregatedInference

log = logging.getLogger(__name__)

_ADAPTERS = (openai, responses, ollama, anthropic, cluster, openapi)
_SPEAKERS: dict[str, Any] = {"/api/": ollama, "/v1/messages": anthropic, "/v1/responses": responses}


def gateway_app(
    core: DisaggregatedInference,
    keys: Keys,
    cors_origins: tuple[str, ...] = (),
    keepalive_s: float | None = None,
    read_s: float = READ_S,
) -> Starlette:
    """`app.state.core` may be another one later: a new config is a new orchestrator."""
    routes = [route for adapter in _ADAPTERS for route in adapter.routes()]
    guards = [Middleware(AuthMiddleware, keys=keys, describe=describe), Middleware(BodyDeadline, read_s=read_s)]
    if cors_origins:
        anything: dict[str, Any] = {"allow_methods": ["*"], "allow_headers": ["*"], "expose_headers": ["*"]}
        guards.insert(0, Middleware(CORSMiddleware, allow_origins=cors_origins, **anything))
    handlers: dict[Any, Any] = {DisaggError: _refused, HTTPException: _no_route, Exception: _failed}
    handlers[ClientDisconnect] = _left
    app = Starlette(routes=routes, middleware=guards, exception_handlers=handlers)
    app.router.redirect_slashes = False  # it would send people where their Host header says
    app.state.core = core
    if keepalive_s:
        app.state.keepalive_s = keepalive_s
    cluster.attach(app)
    return app


def describe(path: str, error: Exception, request_id: str = "") -> Response:
    """As the API that has this path would say it."""
    adapter = next((each for start, each in _SPEAKERS.items() if path.startswith(start)), openai)
    status = error.status if isinstance(error, DisaggError) else 500
    headers = {"x-request-id": request_id} if request_id else {}
    if status in (429, 503):
        headers["Retry-After"] = str(max(1, round(getattr(error, "retry_after_s", 1))))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status == 408:  # the rest may come yet, and would be taken for the next request
        headers["Connection"] = "close"
    named = {"request_id": request_id or None} if adapter is anthropic else {}
    if request_id and adapter is anthropic:
        headers[anthropic.REQUEST_ID] = request_id
    return json_response(adapter.error_body(error, **named), status, headers)


async def _refused(request: Request, error: Exception) -> Response:
    code = getattr(error, "code", "internal_error")
    name = request_id_of(request)
    request.app.state.metrics.refused(error)
    log.warning("refused: %s", error, extra={"path": _path(request), "code": code, "request_id": name})
    return describe(_path(request), error, name)


async def _failed(request: Request, error: Exception) -> Response:
    name = request_id_of(request)
    log.error("a request failed", exc_info=error, extra={"path": _path(request), "request_id": name})
    return describe(_path(request), DisaggError("something went wrong here; the log has the details"), name)


async def _left(request: Request, error: Exception) -> Response:
    """Before its body was whole. Nobody gets this answer."""
    return await _refused(request, Cancelled("the client is gone"))


class NoRoute(BadRequest):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {404: "no such path", 405: f"{request.method} is not for this path"}.get(error.status_code, error.detail)
    refusal = NoRoute(error.status_code, f"{words}: {_path(request)}")
    response = describe(_path(request), refusal, request_id_of(request))
    response.headers.update(error.headers or {})  # Allow
    return response


def _path(request: Request) -> str:
    """Not of `request.url`: that has the Host header in it, which may be anything."""
    path: str = request.scope["path"]
    return path
