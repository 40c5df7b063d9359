"""OpenAI's API: chat completions, completions, models. Responses have a file of their own."""

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from disaggregated_inference.gateway.cluster.routes import window_of
from disaggregated_inference.gateway.openai.chat import chat_completions
from disaggregated_inference.gateway.openai.completions import completions
from disaggregated_inference.gateway.openai.errors import error_body
from disaggregated_inference.gateway.request_context import RequestContext
from disaggregated_inference.http.sse import json_response

__all__ = ["error_body", "routes"]

_STARTED = int(time.time())


def routes() -> list[Route]:
    return [
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{name:path}", model, methods=["GET"]),
    ]


async def models(request: Request) -> Response:
    call = RequestContext(request)
    found = [await _about(call, name, name) for name in call.models()]
    return json_response({"object": "list", "data": found}, headers=call.headers())


async def model(request: Request) -> Response:
    """By its name or an alias, and called as it was asked for."""
    call, asked = RequestContext(request), request.path_params["name"]
    return json_response(await _about(call, asked, call.model(asked)), headers=call.headers())


async def _about(call: RequestContext, shown: str, name: str) -> dict[str, Any]:
    about = {"id": shown, "object": "model", "created": _STARTED, "owned_by": "disaggregated-inference", "root": name}
    window = await window_of(call.core, name)
    return about | ({"context_window": window} if window else {})
