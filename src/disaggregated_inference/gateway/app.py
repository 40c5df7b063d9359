"""The gateway as one ASGI app: the adapters' routes behind API keys, with errors in the shape of each API."""

import logging
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from disaggregated_inference.errors import BadRequest, DisaggError
from disaggregated_inference.gateway import dashboard
from disaggregated_inference.gateway.adapter import Adapter
from disaggregated_inference.gateway.anthropic import routes as anthropic
from disaggregated_inference.gateway.auth import AuthMiddleware, Keys
from disaggregated_inference.gateway.cluster import routes as cluster
from disaggregated_inference.gateway.ollama import routes as ollama
from disaggregated_inference.gateway.openai import responses
from disaggregated_inference.gateway.openai import routes as openai
from disaggregated_inference.gateway.route_index import RouteIndex
from disaggregated_inference.http import error_headers, json_response, request_id
from disaggregated_inference.orchestrator import DisaggregatedInference

log = logging.getLogger(__name__)

# In this order: the first route that matches a request serves it, and the first adapter that owns it describes errors.
ADAPTERS: tuple[Adapter, ...] = (anthropic, ollama, responses, cluster, openai)


def gateway_app(core: DisaggregatedInference, keys: Keys, cors_origins: tuple[str, ...] = ()) -> Starlette:
    """`app.state.core` is replaced when a new config is loaded: each config has its own orchestrator."""
    routes = [*(route for adapter in ADAPTERS for route in adapter.routes()), *dashboard.routes()]
    guard = Middleware(AuthMiddleware, keys=keys, describe=describe, origins=cors_origins)
    middleware = [Middleware(_Failures), guard]
    if cors_origins:
        anything: dict[str, Any] = {"allow_methods": ["*"], "allow_headers": ["*"], "expose_headers": ["*"]}
        middleware.insert(0, Middleware(CORSMiddleware, allow_origins=cors_origins, **anything))
    handlers: dict[Any, Any] = {DisaggError: _refuse, HTTPException: _no_route}
    app = Starlette(routes=[RouteIndex(routes), *routes], middleware=middleware, exception_handlers=handlers)
    app.router.redirect_slashes = False  # a redirect would follow the Host header of the request
    app.state.core = core
    core.on_end.append(keys.ended)
    cluster.attach(app, keys)
    return app


def describe(connection: HTTPConnection, error: Exception) -> Response:
    """The error as the request's API describes it."""
    adapter, id = next(each for each in ADAPTERS if each.owns(connection)), request_id(connection)
    status = error.status if isinstance(error, DisaggError) else 500
    headers = error_headers(error, status) | {"x-request-id": id, adapter.ID_HEADER: id}
    return json_response(adapter.error_body(error, id), status, headers)


class _Failures:
    """Describes unexpected errors. Starlette's own handler for them is outside of all middleware, so that a page in a
    browser could not read its response: CORS headers would be missing."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if started or scope["type"] != "http":
                raise
            await _failure(HTTPConnection(scope), error)(scope, receive, send)


def _failure(connection: HTTPConnection, error: Exception) -> Response:
    extra = {"path": connection.scope["path"], "request_id": request_id(connection)}
    log.error("a request failed", exc_info=error, extra=extra)
    return describe(connection, DisaggError("internal error of the gateway; its log has the details"))


async def _refuse(request: Request, error: Exception) -> Response:
    id, code = request_id(request), getattr(error, "code", "internal_error")
    request.app.state.metrics.refused(error)
    log.warning("refused: %s", error, extra={"path": _path(request), "code": code, "request_id": id})
    return describe(request, error)


class NoRoute(BadRequest):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reasons = {404: "no such path", 405: f"this path does not support {request.method}"}
    refusal = NoRoute(error.status_code, f"{reasons.get(error.status_code, error.detail)}: {_path(request)}")
    response = describe(request, refusal)
    response.headers.update(error.headers or {})  # Allow
    return response


def _path(request: Request) -> str:
    """Not from `request.url`: that contains the Host header, which may be anything."""
    path: str = request.scope["path"]
    return path
