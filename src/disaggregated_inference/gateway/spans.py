"""One trace per request, by OpenTelemetry's SDK. Requests never wait for the collector: a thread of the SDK sends.

Nodes send nothing: the orchestrator's record of a request has their times, so one sender and one clock are enough.
Prompts and completions are not part of a trace.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import cache
from typing import Any

import msgspec
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import Counter
from starlette.applications import Starlette
from starlette.requests import Request

from disaggregated_inference import __version__
from disaggregated_inference.api import RequestRecord
from disaggregated_inference.orchestrator import in_thread
from disaggregated_inference.timeouts import GatewayTimeouts

log = logging.getLogger(__name__)

_PROVIDER = "disaggregated_inference"
_OURS = ("request_id", "method", "plan", "attempts", "warning", "kv_bytes", "kv_codec", "exposed_transfer_time")


class TraceOrigin(msgspec.Struct, frozen=True):
    """Where a request's trace begins: at the span in the caller's `traceparent`, or here with a new trace id."""

    context: Context
    trace_id: int
    attributes: dict[str, Any]


_origin: ContextVar[TraceOrigin | None] = ContextVar("origin", default=None)  # of the request that a task serves


def origin_of(headers: Mapping[str, str], path: str, server: tuple[str, int | None] | None) -> TraceOrigin:
    context = TraceContextTextMapPropagator().extract(headers, Context())
    place = {"url.path": path, "server.address": server[0] if server else None, "server.port": server and server[1]}
    return TraceOrigin(context, RandomIdGenerator().generate_trace_id(), place)


class _TraceIds(RandomIdGenerator):
    """The prompts of one completions request share a trace."""

    def generate_trace_id(self) -> int:
        origin = _origin.get()
        return origin.trace_id if origin else super().generate_trace_id()


class _CountingExporter(trace_exporter.OTLPSpanExporter):
    """Counts traces, by their first span. The SDK's errors are logged once per outage, not once per batch."""

    def __init__(self, url: str, timeout_s: float, counter: Counter) -> None:
        super().__init__(endpoint=url, timeout=timeout_s)
        self._outcomes = {outcome: counter.labels(outcome) for outcome in ("dropped", "sent")}
        self._failing = False
        logging.getLogger(trace_exporter.__name__).addFilter(lambda _: not self._failing)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        self._failing = result is not SpanExportResult.SUCCESS
        traces = sum(span.parent is None or span.parent.is_remote for span in spans)
        self._outcomes["dropped" if self._failing else "sent"].inc(traces)
        return result


class Traces:
    """Lives as long as the gateway. Reads `app.state.core` each time: a new config brings another orchestrator."""

    def __init__(self, app: Starlette, url: str, service: str, timeouts: GatewayTimeouts) -> None:
        self._app, self._service, self._flush_s = app, service, timeouts.trace_flush_s
        counter = Counter("disagg_traces", "Finished traces", ["outcome"], registry=app.state.metrics.registry)
        self._exporter = _CountingExporter(url, timeouts.trace_send_s, counter)
        # At most 128 spans at a time: they are encoded beside the gateway's loop, under one GIL.
        self._processor = BatchSpanProcessor(
            self._exporter, 8192, timeouts.trace_interval_s * 1000, max_export_batch_size=128
        )
        self._tracer = cache(self._make_tracer)
        app.state.traces = self
        app.state.core.on_end.append(self.ended)

    def _make_tracer(self, service: str) -> trace.Tracer:
        """The gateway and every node are services."""
        names = {"service.name": service, "service.namespace": _PROVIDER, "service.version": __version__}
        provider = TracerProvider(resource=Resource.create(names), shutdown_on_exit=False, id_generator=_TraceIds())
        provider.add_span_processor(self._processor)
        return provider.get_tracer(_PROVIDER, __version__)

    def begin(self, request: Request) -> None:
        """Everything that this task, and the tasks it starts, request from the orchestrator belongs to this trace."""
        _origin.set(origin_of(request.headers, request.scope["path"], request.scope.get("server")))

    def ended(self, record: RequestRecord) -> None:
        """A request is answered even if no trace can be made of it."""
        try:
            if origin := _origin.get():
                self._write(record, origin)
        except Exception:
            log.exception("no trace was made of a request", extra={"request_id": record.request_id})

    def _write(self, record: RequestRecord, origin: TraceOrigin) -> None:
        start_ns, end_ns = round(record.time * 1e9), round((record.time + record.total_time) * 1e9)
        servers = {server.name: server for server in self._app.state.core.config.servers}

        def at(seconds: float) -> int:
            """Within the request's span: nodes have clocks of their own, and round."""
            return min(max(start_ns, start_ns + round(seconds * 1e9)), end_ns)

        name, attributes = f"{record.operation} {record.model}", _attributes(record) | origin.attributes
        root = self._start(self._service, name, origin.context, attributes, start_ns)
        for failover in record.failovers:
            event = {f"disagg.{name}": value for name, value in msgspec.structs.asdict(failover).items()}
            root.add_event("failover", _known(event), at(failover.at_s))
        if record.first_token_time:
            root.add_event("first token", timestamp=at(record.first_token_time))
        if record.error and record.outcome in ("failed", "refused"):  # a client that leaves is no failure
            root.set_status(StatusCode.ERROR, record.error.message)
        parent = trace.set_span_in_context(root, Context())
        for phase in record.waterfall:
            server = servers.get(phase.node)
            place = {"server.address": server.host, "server.port": server.port} if server else {}
            span = self._start(phase.node, phase.name, parent, place, at(phase.start_s))
            if phase.name == "failed":
                span.set_status(StatusCode.ERROR)
            span.end(at(phase.start_s + phase.seconds))
        root.end(end_ns)

    def _start(self, service: str, name: str, context: Context, attributes: dict[str, Any], start_ns: int) -> Span:
        """A phase without a node is a part of the gateway's work."""
        kind = SpanKind.SERVER if service else SpanKind.INTERNAL
        tracer = self._tracer(service or self._service)
        return tracer.start_span(name, context, kind, _known(attributes), start_time=start_ns)

    async def close(self) -> None:
        """Sends what is left, for a short time. The SDK would wait 30 s; its threads end with the process."""
        shutdown: Callable[[], None] = self._processor.shutdown
        with suppress(TimeoutError):
            await asyncio.wait_for(in_thread(shutdown), self._flush_s)


def _attributes(record: RequestRecord) -> dict[str, Any]:
    """The names of the GenAI conventions; `disagg.` for what has no name there."""
    return {
        "gen_ai.operation.name": record.operation,
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "gen_ai.response.finish_reasons": [record.finish_reason] if record.finish_reason else None,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "error.type": record.error.code if record.error else None,
    } | {f"disagg.{name}": getattr(record, name) for name in _OURS}


def _known(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}
