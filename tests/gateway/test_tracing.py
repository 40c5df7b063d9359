"""One trace per request, as a collector receives it. Requests are served without a collector, too."""

import asyncio
import builtins
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.trace import get_current_span
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.requests import Request

from disaggregated_inference.api import ErrorDetail, Failover, Phase, RequestRecord
from disaggregated_inference.cluster import load_config
from disaggregated_inference.errors import BadRequest, ConfigError
from disaggregated_inference.gateway.app import gateway_app
from disaggregated_inference.gateway.auth import Keys
from disaggregated_inference.gateway.spans import origin_of
from disaggregated_inference.gateway.tracing import Collector
from disaggregated_inference.orchestrator import DisaggregatedInference
from disaggregated_inference.timeouts import GatewayTimeouts
from tests.support.cluster import Process, free_port
from tests.support.gateway import gateway_process, simulated_config, simulated_pair
from tests.support.waiting import until

MODEL = "simulated:tiny"
ASK: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "temperature": 0}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class FakeCollector:
    """Accepts POSTs to /v1/traces, slowly or not at all if a test wants."""

    def __init__(self) -> None:
        self.status, self.wait = 200, threading.Event()
        self.wait.set()
        self.bodies: list[ExportTraceServiceRequest] = []
        self.requests: list[tuple[str, dict[str, str]]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.requests.append((self.path, dict(self.headers)))
                collector.wait.wait(30)
                if collector.status == 200:
                    collector.bodies.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(collector.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def spans(self) -> list[dict[str, Any]]:
        found = []
        for resource in [each for body in self.bodies for each in body.resource_spans]:
            service = plain(resource.resource.attributes)["service.name"]
            found += [plain_span(span, service) for scope in resource.scope_spans for span in scope.spans]
        return found

    def of(self, request_id: str) -> list[dict[str, Any]]:
        """All spans of a request's trace, the first one first."""
        roots = [span for span in self.spans if span["attributes"].get("disagg.request_id") == request_id]
        return roots + [span for span in self.spans if roots and span["parent"] == roots[0]["id"]]

    def close(self) -> None:
        self.wait.set()
        self._server.shutdown()
        self._server.server_close()


def plain_span(span: Any, service: str) -> dict[str, Any]:
    return {
        "name": span.name,
        "service": service,
        "trace": span.trace_id.hex(),
        "id": span.span_id.hex(),
        "parent": span.parent_span_id.hex(),
        "start": span.start_time_unix_nano,
        "end": span.end_time_unix_nano,
        "status": span.status.code,
        "attributes": plain(span.attributes),
        "events": [(event.name, event.time_unix_nano, plain(event.attributes)) for event in span.events],
    }


def plain(attributes: Iterable[KeyValue]) -> dict[str, Any]:
    def value(each: AnyValue) -> Any:
        kind = each.WhichOneof("value")
        return [value(one) for one in each.array_value.values] if kind == "array_value" else getattr(each, str(kind))

    return {each.key: value(each.value) for each in attributes}


@pytest.fixture
def collector() -> Iterator[FakeCollector]:
    made = FakeCollector()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Process, Process]]:
    with simulated_pair("custom:prefill=20000,decode=500") as nodes:
        yield nodes


def test_one_trace_across_gateway_and_nodes(
    pair: tuple[Process, Process], collector: FakeCollector, tmp_path: Path
) -> None:
    """`disagg gateway` as a process. It stops right after the last response, and still sends all traces."""
    with gateway_process(tmp_path, simulated_config(*pair), "--otlp", collector.url) as gateway:

        def ask(name: str, path: str = "/v1/chat/completions", body: Any = ASK, **headers: str) -> httpx.Response:
            sent = {"x-request-id": name} | headers
            return httpx.post(gateway.url + path, json=body, headers=sent, timeout=60)

        began = time.time_ns()
        assert ask("alone").status_code == 200
        assert ask("streamed", body=ASK | {"stream": True}, traceparent=f"00-{TRACE}-{PARENT}-01").status_code == 200
        assert ask("unwanted", traceparent=f"00-{TRACE}-{PARENT}-00").status_code == 200
        several = {"model": MODEL, "prompt": ["one", "two"], "max_tokens": 2}
        assert ask("many", "/v1/completions", several).status_code == 200
        assert ask("wrong", body=ASK | {"max_tokens": 200_000}).status_code == 400
        gateway.send_signal(signal.SIGTERM)
        assert gateway.ended() == 0
    assert {path for path, _ in collector.requests} == {"/v1/traces"}

    root, *parts = collector.of("alone")
    assert (root["name"], root["service"], root["parent"]) == (f"chat {MODEL}", "disagg-gateway", "")
    assert {"disagg-gateway", "p1", "d1"} == {span["service"] for span in parts}
    assert {("queue", "disagg-gateway"), ("prefill", "p1"), ("decode", "d1")} <= {
        (span["name"], span["service"]) for span in parts
    }
    assert {span["trace"] for span in parts} == {root["trace"]}
    assert len({span["id"] for span in [root, *parts]}) == len(parts) + 1
    assert began < root["start"] < root["end"] < time.time_ns()
    assert all(root["start"] <= span["start"] <= span["end"] <= root["end"] for span in parts)
    assert [name for name, _, _ in root["events"]] == ["first token"]
    attributes = root["attributes"]
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.model"] == MODEL
    assert attributes["gen_ai.usage.input_tokens"] > 5
    assert attributes["gen_ai.usage.output_tokens"] == 3
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == 0
    assert attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert attributes["server.address"] == "127.0.0.1"
    assert attributes["url.path"] == "/v1/chat/completions"
    assert next(span for span in parts if span["service"] == "d1")["attributes"]["server.port"] == pair[1].port

    assert {span["trace"] for span in collector.of("streamed")} == {TRACE}
    assert collector.of("streamed")[0]["parent"] == PARENT
    assert not collector.of("unwanted")
    first, second = collector.of("many-0"), collector.of("many-1")
    assert first[0]["name"] == f"text_completion {MODEL}"
    assert first[0]["trace"] == second[0]["trace"] != root["trace"]
    failed = collector.of("wrong")[0]
    assert failed["attributes"]["error.type"] == "context_too_long"
    assert failed["status"] == 2


@asynccontextmanager
async def gateway(
    pair: tuple[Process, Process], url: str, timeouts: GatewayTimeouts
) -> AsyncIterator[httpx.AsyncClient]:
    async with DisaggregatedInference(load_config(simulated_config(*pair))) as core:
        app = gateway_app(core, Keys())
        traces = Collector(url, {}).traces(app, timeouts)
        assert traces
        try:
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://gateway", timeout=60
            ) as client:
                yield client
        finally:
            await traces.close()


async def counted(client: httpx.AsyncClient) -> dict[str, float]:
    families = text_string_to_metric_families((await client.get("/metrics")).text)
    family = next(family for family in families if family.name == "disagg_traces")
    return {sample.labels["outcome"]: sample.value for sample in family.samples if sample.name.endswith("_total")}


async def until_counted(client: httpx.AsyncClient, outcome: str, least: int) -> None:
    for _ in range(1000):
        if (await counted(client))[outcome] >= least:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(await counted(client))


FAST = GatewayTimeouts(trace_interval_s=0.02, trace_send_s=0.2, trace_flush_s=0.3)


@pytest.mark.parametrize("trouble", ["down", "slow", "error"])
def test_requests_do_not_wait_for_the_collector(
    pair: tuple[Process, Process], collector: FakeCollector, trouble: str
) -> None:
    collector.status = 500
    if trouble == "slow":
        collector.wait.clear()
    url = f"http://127.0.0.1:{free_port()}" if trouble == "down" else collector.url

    async def run() -> float:
        async with gateway(pair, url, FAST) as client:
            for _ in range(5):
                response = await client.post("/v1/chat/completions", json=ASK)
                assert response.status_code == 200
            await until_counted(client, "dropped", 5)
            assert (await counted(client))["sent"] == 0
            await client.post("/v1/chat/completions", json=ASK)
            closing = time.monotonic()
        return time.monotonic() - closing

    assert asyncio.run(run()) < 5  # not the SDK's 30 s


def test_traces_are_sent_again_when_the_collector_is_back(
    pair: tuple[Process, Process], collector: FakeCollector
) -> None:
    async def run() -> None:
        async with gateway(pair, collector.url, FAST) as client:
            for status, outcome in ((503, "dropped"), (200, "sent")):
                collector.status = status
                assert (await client.post("/v1/chat/completions", json=ASK)).status_code == 200
                await until_counted(client, outcome, 1)

    asyncio.run(run())
    assert until(lambda: len(collector.bodies) == 1)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "nonsense",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01-more",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
    ],
)
def test_invalid_traceparent_headers_start_a_new_trace(header: str) -> None:
    origin = origin_of({"traceparent": header}, "/", None)
    assert not get_current_span(origin.context).get_span_context().is_valid
    assert origin.trace_id


def test_later_versions_of_traceparent_are_accepted() -> None:
    origin = origin_of({"traceparent": f" cc-{TRACE}-{PARENT}-03-what-will-be "}, "/", ("::1", 8080))
    parent = get_current_span(origin.context).get_span_context()
    assert (f"{parent.trace_id:032x}", f"{parent.span_id:016x}") == (TRACE, PARENT)
    assert parent.trace_flags.sampled
    assert origin.attributes["server.port"] == 8080


def test_failovers_are_events_and_phases_stay_within_the_request(
    pair: tuple[Process, Process], collector: FakeCollector
) -> None:
    record = RequestRecord(
        model="m",
        operation="chat",
        request_id="r",
        time=1000.0,
        total_time=2.0,
        outcome="cancelled",
        prompt_tokens=9,
        error=ErrorDetail("cancelled", "the client left"),
        failovers=(Failover(node="p1", code="peer_gone", message="it is gone", at_s=0.5),),
        waterfall=(Phase("failed", -0.1, 0.5, "d1"), Phase("decode", 1.5, 1.0, "d1")),
    )

    async def run() -> None:
        app = gateway_app(DisaggregatedInference(load_config(simulated_config(*pair))), Keys())
        traces = Collector(collector.url, {}).traces(app, FAST)
        assert traces
        traces.begin(Request({"type": "http", "headers": [], "path": "/api/chat"}))
        traces.ended(record)
        await traces.close()

    asyncio.run(run())
    root, failed, decode = collector.of("r")
    assert root["status"] == 0
    assert root["attributes"]["error.type"] == "cancelled"
    [(name, time_ns, attributes)] = root["events"]
    assert (name, time_ns, attributes["disagg.node"]) == ("failover", 1000_500_000_000, "p1")
    assert failed["status"] == 2
    assert failed["start"] == root["start"]
    assert decode["end"] == root["end"] == 1002_000_000_000


def test_the_collectors_address() -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318/", "OTEL_SERVICE_NAME": "mine"}
    found = Collector("", environment)
    assert (found.url, found.service) == ("http://collector:4318/v1/traces", "mine")
    assert Collector("https://there", environment).url == "https://there/v1/traces"
    exact = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://there/exactly"}
    assert Collector("", environment | exact).url == "http://there/exactly"
    assert not Collector("", {}).url
    for url in ("collector:4317", "grpc://collector:4317", "http://[", "http://"):
        with pytest.raises(BadRequest, match="--otlp"):
            Collector(url, {})


def test_otlp_headers_reach_the_collector(
    pair: tuple[Process, Process], collector: FakeCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=a%20b, other=c")

    async def run() -> None:
        async with gateway(pair, collector.url, FAST) as client:
            await client.post("/v1/chat/completions", json=ASK)
            await until_counted(client, "sent", 1)

    asyncio.run(run())
    headers = {name.lower(): value for name, value in collector.requests[0][1].items()}
    assert (headers["api-key"], headers["other"]) == ("a b", "c")


def test_without_the_extra_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    load = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(f"No module named {name!r}")
        return load(name, *rest)

    monkeypatch.delitem(sys.modules, "disaggregated_inference.gateway.spans")
    monkeypatch.setattr(builtins, "__import__", without)
    assert Collector("", {}).traces(Starlette()) is None
    with pytest.raises(ConfigError, match=r"pip install 'disaggregated-inference\[tracing\]'"):
        Collector("http://there", {}).traces(Starlette())
