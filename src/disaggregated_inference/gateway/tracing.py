"""One trace per request to an OpenTelemetry collector, if there is one: OTLP over HTTP, in JSON.

Requests never wait for it. What ended stands in a bounded line and is sent in the background; what cannot be sent is
let go, and counted.
"""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from contextvars import ContextVar
from typing import Any
from urllib.parse import unquote, urlsplit

import aiohttp
from prometheus_client import CollectorRegistry, Counter
from starlette.applications import Starlette
from starlette.requests import Request

from disaggregated_inference.errors import BadRequest
from disaggregated_inference.gateway.spans import Came, came, exported, spans_of

log = logging.getLogger(__name__)

_EVERY_S = 1.0
_MOST_WAITING = 1024  # some kilobytes each
_AT_ONCE = 16  # a batch is put together on the loop that serves everyone: a millisecond or two
_SEND_S = 5.0
_FLUSH_S = 3.0  # when the gateway ends

_came: ContextVar[Came | None] = ContextVar("came", default=None)  # of the request that a task works for


class Collector:
    """Where traces go, as the command line or OpenTelemetry's own variables say."""

    def __init__(self, otlp: str, environment: Mapping[str, str] = os.environ) -> None:
        base = otlp or environment.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
        exact = "" if otlp else environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
        self.url = exact or (base.rstrip("/") + "/v1/traces" if base else "")
        self.service = environment.get("OTEL_SERVICE_NAME") or "disagg-gateway"
        pairs = (pair.partition("=") for pair in environment.get("OTEL_EXPORTER_OTLP_HEADERS", "").split(","))
        self.headers = {name.strip(): unquote(value.strip()) for name, _, value in pairs if name.strip()}
        if self.url and not _is_http(self.url):
            raise BadRequest(f"{self.url!r} is no place for traces: give --otlp http://HOST:4318")


def _is_http(url: str) -> bool:
    try:
        return urlsplit(url).scheme in ("http", "https") and bool(urlsplit(url).hostname)
    except ValueError:
        return False


class Traces:
    """As long as the gateway lives. `app.state.core` is asked for each time: a new config brings another one."""

    def __init__(self, app: Starlette, collector: Collector) -> None:
        self._app, self._collector = app, collector
        self._waiting: deque[tuple[dict[str, Any], Came]] = deque()
        self._closing = asyncio.Event()
        self._reached = True
        registry: CollectorRegistry = app.state.metrics.registry
        words = "Traces of requests that a collector took, or that were let go"
        self._counted = Counter("disagg_traces", words, ["outcome"], registry=registry)
        for outcome in ("sent", "dropped"):
            self._counted.labels(outcome)
        app.state.traces = self
        app.state.core.on_end.append(self.ended)
        self._sending = asyncio.create_task(self._send_all())

    def begin(self, request: Request) -> None:
        """Whatever the caller's task, and those that it starts, ask of the orchestrator belongs to this trace."""
        given, scope = request.headers.get("traceparent", ""), request.scope
        _came.set(came(given, scope["path"], scope.get("server")))

    def ended(self, record: dict[str, Any]) -> None:
        begun = _came.get()
        if begun is None or not begun.sampled:
            return
        if len(self._waiting) < _MOST_WAITING and not self._closing.is_set():
            self._waiting.append((record, begun))
        else:
            self._counted.labels("dropped").inc()

    async def close(self) -> None:
        """What waits is sent, as far as a moment allows."""
        self._closing.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_S):
                await asyncio.shield(self._sending)
        self._sending.cancel()
        await asyncio.wait({self._sending})

    async def _send_all(self) -> None:
        timeout = aiohttp.ClientTimeout(total=_SEND_S)
        async with aiohttp.ClientSession(headers=self._collector.headers, timeout=timeout) as session:
            while not self._closing.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), _EVERY_S)
                while self._waiting:
                    some = [self._waiting.popleft() for _ in range(min(_AT_ONCE, len(self._waiting)))]
                    failure = await self._sent(session, some)
                    self._counted.labels("dropped" if failure else "sent").inc(len(some))
                    self._tell(failure)

    async def _sent(self, session: aiohttp.ClientSession, some: list[tuple[dict[str, Any], Came]]) -> str:
        """Why not; empty where all went well. Not tried again: newer ones wait, and a collector that is overwhelmed
        gets no more than it got."""
        try:
            servers = {server.name: server for server in self._app.state.core.config.servers}
            body = exported([spans_of(record, begun, servers, self._collector.service) for record, begun in some])
            kind = {"Content-Type": "application/json"}
            async with session.post(self._collector.url, data=body, headers=kind) as response:
                return "" if response.status < 300 else f"HTTP {response.status}"
        except Exception as error:  # whatever it is, it is nobody's problem but ours
            return str(error) or type(error).__name__

    def _tell(self, failure: str) -> None:
        """Once, and once more when it is over."""
        if bool(failure) == self._reached:
            said = f"traces are let go: {failure}" if failure else "traces are sent again"
            log.warning("%s", said)
        self._reached = not failure
