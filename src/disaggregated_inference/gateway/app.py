"""The gateway as one ASGI app: adapters' routes behind keys, with errors in each API's own shape."""

import logging
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from disaggregated_inference.errors import BadRequest, DisaggError
from disaggregated_inference.gateway.adapters import anthropic, cluster, ollama, openai, responses
from disaggregated_inference.gateway.answers import json_response
from disaggregated_inference.gateway.auth import Guard, Keys
from disaggregated_inference.gateway.call import request_id_of
from disaggregated_inference.orchestrator import DisaggregatedInference

log = logging.getLogger(__name__)

_ADAPTERS = (openai, responses, ollama, anthropic, cluster)


def gateway_app(core: DisaggregatedInference, keys: Keys, cors_origins: tuple[str, ...] = ()) -> Starlette:
    """`app.state.core` may be another one later: a new config is a new orchestrator."""
    routes = [route for adapter in _ADAPTERS for route in adapter.routes()]
    guards = [Middleware(Guard, keys=keys, describe=describe)]
    if cors_origins:
        anything: dict[str, Any] = {"allow_methods": ["*"], "allow_headers": ["*"], "expose_headers": ["*"]}
        guards.insert(0, Middleware(CORSMiddleware, allow_origins=cors_origins, **anything))
    handlers: dict[Any, Any] = {DisaggError: _refused, HTTPException: _no_route, Exception: _failed}
    app = Starlette(routes=routes, middleware=guards, exception_handlers=handlers)
    app.state.core = core
    cluster.attach(app)
    return app


def describe(path: str, error: Exception, request_id: str = "") -> Response:
    """As the API that has this path would say it."""
    adapter = ollama if path.startswith("/api/") else anthropic if path.startswith("/v1/messages") else openai
    status = error.status if isinstance(error, DisaggError) else 500
    headers = {"x-request-id": request_id} if request_id else {}
    if status in (429, 503):
        headers["Retry-After"] = str(max(1, round(getattr(error, "retry_after_s", 1))))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(adapter.error_body(error), status, headers)


async def _refused(request: Request, error: Exception) -> Response:
    code = getattr(error, "code", "internal_error")
    name = request_id_of(request)
    log.warning("refused: %s", error, extra={"path": request.url.path, "code": code, "request_id": name})
    return describe(request.url.path, error, name)


async def _failed(request: Request, error: Exception) -> Response:
    name = request_id_of(request)
    log.error("a request failed", exc_info=error, extra={"path": request.url.path, "request_id": name})
    return describe(request.url.path, DisaggError("something went wrong here; the log has the details"), name)


class NoRoute(BadRequest):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {404: "no such path", 405: f"{request.method} is not for this path"}.get(error.status_code, error.detail)
    return describe(request.url.path, NoRoute(error.status_code, f"{words}: {request.url.path}"))
