"""The gateway as one ASGI app: the adapters' routes behind API keys, with errors in the shape of each API."""

import logging
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from disaggregated_inference.errors import BadRequest, DisaggError
from disaggregated_inference.gateway import openapi
from disaggregated_inference.gateway.anthropic import routes as anthropic
from disaggregated_inference.gateway.auth import AuthMiddleware, Keys
from disaggregated_inference.gateway.cluster import routes as cluster
from disaggregated_inference.gateway.ollama import routes as ollama
from disaggregated_inference.gateway.openai import responses
from disaggregated_inference.gateway.openai import routes as openai
from disaggregated_inference.http import error_headers, json_response, request_id
from disaggregated_inference.orchestrator import DisaggregatedInference

log = logging.getLogger(__name__)

_ADAPTERS = (openai, responses, ollama, anthropic, cluster, openapi)
_BY_PATH: dict[str, Any] = {"/api/": ollama, "/v1/messages": anthropic, "/v1/responses": responses}


def gateway_app(core: DisaggregatedInference, keys: Keys, cors_origins: tuple[str, ...] = ()) -> Starlette:
    """`app.state.core` is replaced when a new config is loaded: each config has its own orchestrator."""
    routes = [route for adapter in _ADAPTERS for route in adapter.routes()]
    middleware = [Middleware(AuthMiddleware, keys=keys, describe=describe)]
    if cors_origins:
        anything: dict[str, Any] = {"allow_methods": ["*"], "allow_headers": ["*"], "expose_headers": ["*"]}
        middleware.insert(0, Middleware(CORSMiddleware, allow_origins=cors_origins, **anything))
    handlers: dict[Any, Any] = {DisaggError: _refuse, HTTPException: _no_route, Exception: _fail}
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    app.router.redirect_slashes = False  # a redirect would follow the Host header of the request
    app.state.core = core
    cluster.attach(app)
    return app


def describe(path: str, error: Exception, id: str = "") -> Response:
    """The error as the API of this path describes it. `id` is the request's."""
    adapter = next((each for start, each in _BY_PATH.items() if path.startswith(start)), openai)
    status = error.status if isinstance(error, DisaggError) else 500
    headers = error_headers(error, status) | ({"x-request-id": id} if id else {})
    if adapter is not anthropic:
        return json_response(adapter.error_body(error), status, headers)
    headers |= {anthropic.REQUEST_ID: id} if id else {}
    return json_response(anthropic.error_body(error, request_id=id or None), status, headers)


async def _refuse(request: Request, error: Exception) -> Response:
    id, code = request_id(request), getattr(error, "code", "internal_error")
    request.app.state.metrics.refused(error)
    log.warning("refused: %s", error, extra={"path": _path(request), "code": code, "request_id": id})
    return describe(_path(request), error, id)


async def _fail(request: Request, error: Exception) -> Response:
    id = request_id(request)
    log.error("a request failed", exc_info=error, extra={"path": _path(request), "request_id": id})
    return describe(_path(request), DisaggError("internal error of the gateway; its log has the details"), id)


class NoRoute(BadRequest):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reasons = {404: "no such path", 405: f"this path does not support {request.method}"}
    refusal = NoRoute(error.status_code, f"{reasons.get(error.status_code, error.detail)}: {_path(request)}")
    response = describe(_path(request), refusal, request_id(request))
    response.headers.update(error.headers or {})  # Allow
    return response


def _path(request: Request) -> str:
    """Not from `request.url`: that contains the Host header, which may be anything."""
    path: str = request.scope["path"]
    return path
