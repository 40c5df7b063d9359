"""A node from its first second on: its port answers `loading` while a thread loads the model, then the node serves."""

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from disaggregated_inference.api import NodeHealth, StartLine
from disaggregated_inference.errors import NodeLoading
from disaggregated_inference.http import Announce, Bearer, HttpServer, RequestId, error_response, json_response
from disaggregated_inference.identity import Identity
from disaggregated_inference.node.node import Node
from disaggregated_inference.node.routes import node_app
from disaggregated_inference.node.trust import Trust
from disaggregated_inference.timeouts import NodeTimeouts


class Begin(Protocol):
    """Is called with the step of loading that begins, and again with the part of it that is done, if that is known."""

    def __call__(self, step: str, part: float | None = None) -> None: ...


Load = Callable[[Begin], Node]
MakeApp = Callable[[Node, str | None], Starlette]


class NodeStart:
    """`load` runs on a thread of its own. Its error ends the process; a signal meanwhile ends it at once. `health` is
    what the port answers until then, with HTTP 503: a loading node takes no requests. `on_end` is always called."""

    def __init__(
        self,
        load: Load,
        health: NodeHealth,
        address: tuple[str, int],
        token: str,
        drain_s: int,
        announce: Announce,
        trust: Trust = Trust(),
        make_app: MakeApp = node_app,
        on_end: Callable[[], None] = lambda: None,
        timeouts: NodeTimeouts = NodeTimeouts(),
    ) -> None:
        self._timeouts = timeouts
        self._load_node, self._health, self._host = load, health, address[0]
        self._make_app, self._on_end = make_app, on_end
        self._token, self._drain_s, self._announce = token or None, drain_s, announce
        self._step, self._began_at = "starting", time.monotonic()
        self._served: Node | None = None
        self._error: BaseException | None = None
        self._closes_at, self._stopped = 0.0, False
        self._server = HttpServer(
            self._loading_app(),
            *address,
            drain_s,
            on_ready=self._listening,
            on_stop=self._stopping,
            **peer_tls(trust.identity),
        )
        self._scheme: Literal["http", "https"] = "https" if trust.identity else "http"

    def run(self) -> None:
        """Until a signal."""
        try:
            self._server.run()
        finally:
            if self._served:
                _close(self._served, max(0.0, min(self._closes_at - time.monotonic(), self._drain_s)))
            self._on_end()
        if self._error:
            raise self._error
        if not self._served:  # stopped while it loads: a library's thread may not survive the interpreter's end
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def _listening(self, port: int) -> None:
        threading.Thread(target=self._load, args=(port,), name="load", daemon=True).start()

    def _load(self, port: int) -> None:
        try:
            served = self._load_node(self._begin)
        except BaseException as error:
            if self._stopped:
                return  # what was loading has been ended
            self._error = error
            self._server.stop()
        else:
            self._server.call_soon(lambda: self._serve(served, port))

    def _begin(self, step: str, part: float | None = None) -> None:
        """Also when an unloaded model is loaded again: then the node serves already."""
        self._step = step if part is None else f"{step} {part:.0%}"
        if not self._served:
            self._announce(StartLine(event="step", step=step, part=part))

    def _serve(self, served: Node, port: int) -> None:
        self._served = served
        self._server.mount(self._make_app(served, self._token))
        self._announce(self._ready_line(served, port))

    def _ready_line(self, served: Node, port: int) -> StartLine:
        return StartLine(
            event="ready",
            port=port,
            host=self._host,
            scheme=self._scheme,
            role=served.role,
            model=served.model.name,
            backend=served.kv_memory.engine.name,
            kv_port=served.prefill.kv_addresses[0][1] if served.prefill else 0,
            kv_addresses=served.kv_addresses,
            kv_limit_bytes=served.kv_memory.admission.limit_bytes,
            seconds=round(time.monotonic() - self._began_at, 1),
        )

    def _stopping(self) -> None:
        self._stopped = True
        self._announce(StartLine(event="stopping"))
        self._closes_at = time.monotonic() + self._drain_s
        if self._served:
            self._served.kv_memory.draining = True

    def _loading_app(self) -> Starlette:
        """All paths but /health refuse: the node's own ones, and those that it will not have."""

        async def health(request: Request) -> Response:
            return json_response(msgspec.structs.replace(self._health, reason=self._reason()), 503)

        async def drain(request: Request) -> Response:
            response = json_response({"draining": True, "waiting": 0})
            response.background = BackgroundTask(request.app.state.stop)
            return response

        async def refuse(request: Request, error: Exception) -> Response:
            retry_s = self._timeouts.loading_hint_s
            return error_response(NodeLoading(f"this node is {self._reason()}; try again in {retry_s} s"), retry_s)

        routes = [Route("/health", health), Route("/drain", drain, methods=["POST"])]
        middleware = [Middleware(RequestId), *([Middleware(Bearer, token=self._token)] if self._token else [])]
        handlers: dict[Any, Any] = {404: refuse, 405: refuse}
        return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)

    def _reason(self) -> str:
        return f"{self._step} ({time.monotonic() - self._began_at:.0f} s so far)"


def peer_tls(identity: Identity | None) -> dict[str, Any]:
    """Options of `HttpServer`: only members of the cluster may connect."""
    return {"peers": identity.server_context, "require_peer": identity.require} if identity else {}


def _close(served: Node, drain_s: float) -> None:
    try:
        if served.readings:
            served.readings.close()
        for role in served.roles:
            role.close(drain_s=drain_s)
    finally:
        served.kv_memory.close_all()
        served.kv_memory.scheduler.stop()
