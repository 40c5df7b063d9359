"""The context of one request: its id, its caller, and the response headers that name the nodes."""

from contextlib import suppress
from typing import Any

from starlette.requests import Request

from disaggregated_inference.api import RequestOptions
from disaggregated_inference.errors import ModelNotFound
from disaggregated_inference.gateway.auth import Caller
from disaggregated_inference.http import request_id
from disaggregated_inference.orchestrator import DisaggregatedInference, Route

_MAX_REASON = 200


class RequestContext:
    """Everything about a request besides its body. `core` is the orchestrator."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.core: DisaggregatedInference = request.app.state.core
        self.caller: Caller = request.scope["state"]["caller"]
        self.id = request_id(request)
        self._headers = {"x-request-id": self.id}
        if traces := getattr(request.app.state, "traces", None):
            traces.begin(request)

    def model(self, name: Any) -> str:
        """The cluster's name of the model, if this caller may use it."""
        names = self.models()
        with suppress(ModelNotFound):
            if (found := self.core.config.resolve_model(name if isinstance(name, str) else None)) in names:
                return found
        problem = f"no model {name!r}" if name else "name a model"
        raise ModelNotFound(f"{problem}; there are {', '.join(names) or 'none'}")

    def models(self) -> list[str]:
        """The models that this caller may use."""
        return [name for name in self.core.config.names if self.caller.may_use(name)]

    def options(self) -> RequestOptions:
        """Options of the orchestrator, besides those of the API."""
        return {"request_id": self.id}

    def headers(self) -> dict[str, str]:
        return dict(self._headers)

    def on_plan(self, route: Route, reason: str) -> None:
        plain = reason.encode("ascii", "replace").decode()[:_MAX_REASON]
        self._headers |= {"x-disagg-plan": plain, "x-disagg-decode": _plain(route.decode)}
        if route.prefill:
            self._headers["x-disagg-prefill"] = _plain(route.prefill)


def _plain(name: str) -> str:
    return name.encode("ascii", "replace").decode()
