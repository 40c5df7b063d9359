"""What the HTTP of every node has, whether an engine of ours or an Ollama computes for it: paths, token, errors."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Lifespan

from disaggregated_inference.api import ErrorBody, ErrorDetail, ModelInfo, NodeHealth, NodeStatus, TokenizerContent
from disaggregated_inference.errors import DisaggError
from disaggregated_inference.http import (
    Bearer,
    OwnSite,
    RequestId,
    StreamChecksums,
    error_response,
    json_response,
    request_id,
)
from disaggregated_inference.node.metrics import RequestMetrics

log = logging.getLogger(__name__)

_ROLES = {"/prefill": "prefill", "/decode": "decode", "/generate": "decode"}  # of the paths that are counted


class ServedNode(Protocol):
    """The part of a node that its shared paths need."""

    async def health(self) -> NodeHealth: ...
    async def status(self) -> NodeStatus: ...
    async def model_info(self) -> ModelInfo: ...
    async def tokenizer(self) -> TokenizerContent: ...
    async def load(self) -> None: ...
    async def unload(self) -> None: ...
    def drain(self) -> int:
        """Take no new requests. Returns how many are still open."""
        ...

    def retry_after_s(self, error: DisaggError) -> int: ...


def base_app(
    node: ServedNode,
    metrics: RequestMetrics,
    routes: Sequence[Route],
    token: str | None,
    lifespan: Lifespan[Starlette] | None = None,
) -> Starlette:
    """The paths that all nodes have, and `routes`."""

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, DisaggError)
        path = request.scope["path"]
        log.warning("refused: %s", error, extra={"request_id": request_id(request), "path": path, "code": error.code})
        if (role := _ROLES.get(path)) and not getattr(request.state, "started", False):
            metrics.count_refusal(role, error)  # a started request is counted when it ends
        return error_response(error, node.retry_after_s(error) if error.status == 503 else None)

    middleware = [
        Middleware(RequestId),
        Middleware(Bearer, token=token) if token else Middleware(OwnSite),
        Middleware(StreamChecksums),
    ]
    all_routes = [*_shared_routes(node, metrics), *routes]
    offered = frozenset(route.path for route in all_routes)

    async def no_route(request: Request, error: Exception) -> Response:
        status, path = getattr(error, "status_code", 404), request.scope["path"]
        code, reason = ("not_found", "no such path") if status == 404 else ("method_not_allowed", "wrong method")
        message = _wrong_role(path, offered) or f"{reason}: {request.method} {path}"
        return json_response(ErrorBody(ErrorDetail(code, message)), status)

    handlers: dict[Any, Any] = {DisaggError: refuse, 404: no_route, 405: no_route}
    return Starlette(routes=all_routes, middleware=middleware, exception_handlers=handlers, lifespan=lifespan)


def _shared_routes(node: ServedNode, metrics: RequestMetrics) -> list[Route]:
    async def health(request: Request) -> Response:
        state = await node.health()
        return json_response(state, 503 if state.status in ("unhealthy", "draining") else 200)

    async def show_metrics(request: Request) -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def drain(request: Request) -> Response:
        """As SIGTERM does: the node finishes its open requests, then the process ends."""
        response = json_response({"draining": True, "waiting": node.drain()})
        response.background = BackgroundTask(request.app.state.stop)
        return response

    return [
        Route("/health", health),
        Route("/status", _show(node.status)),
        Route("/model", _show(node.model_info)),
        Route("/model/tokenizer", _show(node.tokenizer)),
        Route("/metrics", show_metrics),
        Route("/drain", drain, methods=["POST"]),
        Route("/load", _show(node.health, after=node.load), methods=["POST"]),
        Route("/unload", _show(node.health, after=node.unload), methods=["POST"]),
    ]


def _show(
    read: Callable[[], Awaitable[object]], after: Callable[[], Awaitable[None]] | None = None
) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        if after:
            await after()
        return json_response(await read())

    return respond


def _wrong_role(path: str, offered: frozenset[str]) -> str:
    """What to do with a request for the role that this node does not have; empty if it is not that."""
    role = _ROLES.get(path)
    if role is None or path in offered:
        return ""
    own = "decode" if role == "prefill" else "prefill"
    return f"this is a {own} node, without {path}: send it to a {role} node (`disagg serve --role {role}`)"
