"""OpenAI's API: chat completions, completions, models. Responses are in `responses`."""

import time
from collections.abc import Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import Route

from disaggregated_inference.api import ClusterNode
from disaggregated_inference.errors import NotOffered
from disaggregated_inference.gateway.cluster.routes import context_window
from disaggregated_inference.gateway.openai.chat import chat_completions
from disaggregated_inference.gateway.openai.completions import completions
from disaggregated_inference.gateway.openai.errors import error_body
from disaggregated_inference.gateway.request_context import RequestContext
from disaggregated_inference.http import json_response

__all__ = ["ID_HEADER", "NAME", "error_body", "owns", "routes"]

NAME, ID_HEADER = "openai", "x-request-id"
_STARTED = int(time.time())


def owns(connection: HTTPConnection) -> bool:
    """Everything that no other API owns."""
    return True


def routes() -> list[Route]:
    return [
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{name:path}", model, methods=["GET"]),
        Route("/v1/embeddings", embeddings, methods=["POST"]),
    ]


async def models(request: Request) -> Response:
    context = RequestContext(request)
    nodes = (await context.core.cluster_status()).nodes
    found = [await _description(context, id, name, nodes) for id, name in context.names().items()]
    return json_response({"object": "list", "data": found}, headers=context.headers())


async def model(request: Request) -> Response:
    """By name or alias; the response has the name that the client used, unless only a part of it fits."""
    context, name = RequestContext(request), request.path_params["name"]
    if not name:
        raise HTTPException(404)
    model, nodes = context.model(name), (await context.core.cluster_status()).nodes
    return json_response(await _description(context, context.shown_model, model, nodes), headers=context.headers())


async def embeddings(request: Request) -> Response:
    raise NotOffered("/v1/embeddings: no node makes embeddings; use another server for them, an Ollama for instance")


async def _description(context: RequestContext, id: str, name: str, nodes: Sequence[ClusterNode]) -> dict[str, Any]:
    """`weights`: hashes of the weights with which the nodes answer."""
    found = {"id": id, "object": "model", "created": _STARTED, "owned_by": "disaggregated-inference", "root": name}
    window = await context_window(context.core, name)
    weights = sorted({node.weights for node in nodes if node.model == name and node.weights})
    return found | ({"context_window": window} if window else {}) | ({"weights": weights} if weights else {})
