"""The context of one request: its id, its caller, and the response headers that name the nodes."""

import re
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from disaggregated_inference.api import LocalPrefill, RequestOptions
from disaggregated_inference.cluster import bare_name
from disaggregated_inference.errors import BadRequest, NotForThisKey
from disaggregated_inference.gateway.auth import Caller
from disaggregated_inference.http import request_id
from disaggregated_inference.orchestrator import DisaggregatedInference, Route

ROUTE_HEADER = "x-disagg-route"
_ROUTES: dict[str, LocalPrefill] = {"auto": "auto", "local": "always", "handover": "never"}
_MAX_REASON = 200
_MAX_WARNING = 500


class RequestContext:
    """Everything about a request besides its body. `core` is the orchestrator."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.core: DisaggregatedInference = request.app.state.core
        self.caller: Caller = request.scope["state"]["caller"]
        self.id = request_id(request)
        self.shown_model = ""  # in the response: as the client named the model, once `model` has found it
        self._headers = {"x-request-id": self.id}
        if traces := getattr(request.app.state, "traces", None):
            traces.begin(request)

    def model(self, name: Any, without_tag: str = "") -> str:
        """The cluster's name of the model, if this caller may use it. The response repeats the client's name, because
        programs compare; but not one of which only a part fits. `without_tag`: the name to look up instead."""
        given = name if isinstance(name, str) else ""
        match = self.core.config.match_model(without_tag or given, self.models())
        self.shown_model = match.name if match.is_part or not bare_name(given) else given
        self._headers["x-disagg-model"] = _plain(match.name)
        return match.name

    def models(self) -> list[str]:
        """The models that this caller may use."""
        return [name for name in self.core.config.names if self.caller.may_use(name)]

    def names(self) -> dict[str, str]:
        """The names and aliases of those models, each with the model's own name."""
        config = self.core.config
        return {each: name for name in self.models() for each in (name, *config.options_of(name).aliases)}

    def options(self, cache_salt: str | None = None) -> RequestOptions:
        """Options of the orchestrator, besides those of the API. `cache_salt`: the client's own."""
        caller, sharing = self.caller, self.core.config.policies.prefix_sharing
        options: RequestOptions = {"request_id": self.id, "cache_salt": caller.cache_salt(sharing, cache_salt)}
        return options | ({"caller": caller.name} if caller.owner else {}) | self._route_wish()

    def _route_wish(self) -> RequestOptions:
        """An operator may compare routes: a forced one can be slower for all."""
        wish = self.request.headers.get(ROUTE_HEADER)
        if wish is None:
            return {}
        if not self.caller.sees_all:
            raise NotForThisKey(f"{ROUTE_HEADER} is for operators: leave it out, or send a key with `operator`")
        if wish not in _ROUTES:
            raise BadRequest(f"{ROUTE_HEADER}: {wish[:40]!r} is no route; give {', '.join(_ROUTES)}")
        return {"local": _ROUTES[wish]}

    def headers(self) -> dict[str, str]:
        return dict(self._headers)

    def note(self, text: str) -> None:
        """For the client's developer: a wish of the request that has no effect here."""
        self._headers["x-disagg-note"] = _plain(text)[:_MAX_REASON]

    def on_plan(self, route: Route, reason: str, warnings: Sequence[str]) -> None:
        self._headers |= {"x-disagg-plan": _plain(reason)[:_MAX_REASON], "x-disagg-decode": _plain(route.decode)}
        if warnings:
            self._headers["x-disagg-warning"] = _plain("; ".join(warnings))[:_MAX_WARNING]
        if route.prefill:
            self._headers["x-disagg-prefill"] = _plain(route.prefill)


def _plain(name: str) -> str:
    """As a header may have it."""
    return re.sub(r"[^ -~]", "?", name)
