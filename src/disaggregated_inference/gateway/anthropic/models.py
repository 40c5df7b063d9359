"""Anthropic's list of models. `/v1/models` is OpenAI's path too: the header `anthropic-version` tells them apart."""

from datetime import UTC, datetime
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from disaggregated_inference.errors import BadRequest
from disaggregated_inference.gateway.cluster.routes import context_window
from disaggregated_inference.gateway.request_context import RequestContext
from disaggregated_inference.http import json_response

_VERSION = "anthropic-version"
_CREATED = datetime.now(UTC).isoformat()  # clients want a time; the model's own is unknown
_USUAL_PAGE, _MAX_PAGE = 20, 1000


def is_anthropic(connection: HTTPConnection) -> bool:
    return _VERSION in connection.headers


class AnthropicRoute(Route):
    """Matches requests of Anthropic's clients only."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        found = super().matches(scope)
        return found if found[0] is Match.NONE or is_anthropic(HTTPConnection(scope)) else (Match.NONE, {})


async def models(request: Request) -> Response:
    context = RequestContext(request)
    names, more = _page(list(context.names()), request)
    data = [await _described(context, name) for name in names]
    ends = {"first_id": names[0], "last_id": names[-1]} if names else {"first_id": None, "last_id": None}
    return json_response({"data": data, "has_more": more, **ends}, headers=context.headers())


async def model(request: Request) -> Response:
    context, name = RequestContext(request), request.path_params["name"]
    if not name:
        raise HTTPException(404)
    return json_response(await _described(context, name), headers=context.headers())


async def _described(context: RequestContext, name: str) -> dict[str, Any]:
    window = await context_window(context.core, context.model(name))
    limits = {"max_input_tokens": window, "max_tokens": window}  # prompt and completion share the window
    named = {"type": "model", "id": name, "display_name": name, "created_at": _CREATED, "lifecycle": "active"}
    return named | limits


def _page(names: list[str], request: Request) -> tuple[list[str], bool]:
    """One page, and whether more follow in its direction."""
    query = request.query_params
    limit, after, before = query.get("limit", str(_USUAL_PAGE)), query.get("after_id"), query.get("before_id")
    if not limit.isdecimal() or not 1 <= int(limit) <= _MAX_PAGE:
        raise BadRequest(f"limit must be from 1 to {_MAX_PAGE}")
    if after and before:
        raise BadRequest("give one of after_id and before_id, not both")
    if (cursor := after or before) and cursor not in names:
        raise BadRequest(f"no model {cursor!r} in this list: give an id of it as after_id or before_id")
    if before:
        left = names[: names.index(before)]
        return left[-int(limit) :], len(left) > int(limit)
    left = names[names.index(after) + 1 :] if after else names
    return left[: int(limit)], len(left) > int(limit)
