"""One request's way through the gateway: its id, who calls, and the headers that say who served it."""

from contextlib import suppress
from typing import Any

from starlette.requests import Request

from disaggregated_inference.errors import ModelNotFound
from disaggregated_inference.gateway.auth import Caller
from disaggregated_inference.http.request_id import request_id_of
from disaggregated_inference.orchestrator import DisaggregatedInference
from disaggregated_inference.orchestrator.cluster_view import Route

_MOST_REASON = 200


class RequestContext:
    """What an adapter has of a request beside its body. `core` is the orchestrator."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.core: DisaggregatedInference = request.app.state.core
        self.caller: Caller = request.scope["state"]["caller"]
        self.id = request_id_of(request)
        self._headers = {"x-request-id": self.id}
        if traces := getattr(request.app.state, "traces", None):
            traces.begin(request)

    def model(self, name: Any) -> str:
        """The cluster's own name for what was asked for, if this caller may have it."""
        names = self.models()
        with suppress(ModelNotFound):
            if (found := self.core.config.resolve_model(name if isinstance(name, str) else None)) in names:
                return found
        asked = f"no model {name!r}" if name else "name a model"
        raise ModelNotFound(f"{asked}; there are {', '.join(names) or 'none'}")

    def models(self) -> list[str]:
        """Those that this caller may have."""
        return [name for name in self.core.config.names if self.caller.may_use(name)]

    def options(self) -> dict[str, Any]:
        """For the orchestrator, beside what the API asks for."""
        return {"request_id": self.id, "on_plan": self._planned}

    def headers(self) -> dict[str, str]:
        return dict(self._headers)

    def _planned(self, option: Route, reason: str) -> None:
        plain = reason.encode("ascii", "replace").decode()[:_MOST_REASON]
        self._headers |= {"x-disagg-plan": plain, "x-disagg-decode": _plain(option.decode)}
        if option.prefill:
            self._headers["x-disagg-prefill"] = _plain(option.prefill)


def _plain(name: str) -> str:
    return name.encode("ascii", "replace").decode()
