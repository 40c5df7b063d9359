"""One trace per request, as a collector gets it; and what happens to requests when there is none: nothing."""

import asyncio
import json
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from disaggregated_inference.cluster.config import load_config
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.gateway import tracing
from disaggregated_inference.gateway.app import gateway_app
from disaggregated_inference.gateway.auth import Keys
from disaggregated_inference.gateway.spans import came, exported, spans_of
from disaggregated_inference.gateway.tracing import Collector, Traces
from disaggregated_inference.orchestrator import DisaggregatedInference
from disaggregated_inference.orchestrator.cluster_view import Route
from disaggregated_inference.orchestrator.recorder import RequestRecorder
from tests.conftest import until
from tests.support.cluster import Process, free_port
from tests.support.gateway import gateway_process, simulated_config, simulated_pair

MODEL = "simulated:tiny"
ASK: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "temperature": 0}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class FakeCollector:
    """Takes what is posted to /v1/traces, or is slow, or says no."""

    def __init__(self) -> None:
        self.status, self.wait = 200, threading.Event()
        self.wait.set()
        self.bodies: list[dict[str, Any]] = []
        self.asked: list[tuple[str, dict[str, str]]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.asked.append((self.path, dict(self.headers)))
                collector.wait.wait(30)
                if collector.status == 200:
                    collector.bodies.append(json.loads(body))
                self.send_response(collector.status)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def spans(self) -> list[dict[str, Any]]:
        """Each with its service and its attributes as a dict."""
        found = []
        for resource in [each for body in self.bodies for each in body["resourceSpans"]]:
            service = plain(resource["resource"]["attributes"])["service.name"]
            for span in resource["scopeSpans"][0]["spans"]:
                found.append(span | {"service": service, "told": plain(span["attributes"])})
        return found

    def of(self, request_id: str) -> list[dict[str, Any]]:
        """All spans of a request's trace, the first one first."""
        roots = [span for span in self.spans if span["told"].get("disagg.request_id") == request_id]
        return roots + [span for span in self.spans if roots and span["parentSpanId"] == roots[0]["spanId"]]

    def close(self) -> None:
        self.wait.set()
        self._server.shutdown()
        self._server.server_close()


def plain(attributes: list[dict[str, Any]]) -> dict[str, Any]:
    def value(each: dict[str, Any]) -> Any:
        [(kind, found)] = each.items()
        if kind == "arrayValue":
            return [value(one) for one in found["values"]]
        return int(found) if kind == "intValue" else found

    return {each["key"]: value(each["value"]) for each in attributes}


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


def test_one_trace_across_all_three(pair: tuple[Process, Process], collector: FakeCollector, tmp_path: Path) -> None:
    """As people run it. It is told to stop right after the last answer: nothing is lost for that."""
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
        gateway.tell(signal.SIGTERM)
        assert gateway.ended() == 0
    assert {path for path, _ in collector.asked} == {"/v1/traces"}

    root, *parts = collector.of("alone")
    assert (root["name"], root["service"], root["parentSpanId"]) == (f"chat {MODEL}", "disagg-gateway", "")
    assert {"disagg-gateway", "p1", "d1"} == {span["service"] for span in parts}
    assert {("queue", "disagg-gateway"), ("prefill", "p1"), ("decode", "d1")} <= {
        (span["name"], span["service"]) for span in parts
    }
    assert {span["traceId"] for span in parts} == {root["traceId"]}
    assert len({span["spanId"] for span in [root, *parts]}) == len(parts) + 1
    start, end = int(root["startTimeUnixNano"]), int(root["endTimeUnixNano"])
    assert began < start < end < time.time_ns()
    assert all(start <= int(s["startTimeUnixNano"]) <= int(s["endTimeUnixNano"]) <= end for s in parts)
    assert [event["name"] for event in root["events"]] == ["first token"]
    told = root["told"]
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.model"] == MODEL
    assert told["gen_ai.usage.input_tokens"] > 5
    assert told["gen_ai.usage.output_tokens"] == 3
    assert told["gen_ai.usage.cache_read.input_tokens"] == 0
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert told["server.address"] == "127.0.0.1"
    assert next(span for span in parts if span["service"] == "d1")["told"]["server.port"] == pair[1].port

    assert {span["traceId"] for span in collector.of("streamed")} == {TRACE}
    assert collector.of("streamed")[0]["parentSpanId"] == PARENT
    assert not collector.of("unwanted")
    first, second = collector.of("many-0"), collector.of("many-1")
    assert first[0]["name"] == f"text_completion {MODEL}"
    assert first[0]["traceId"] == second[0]["traceId"] != root["traceId"]
    failed = collector.of("wrong")[0]
    assert failed["told"]["error.type"] == "context_too_long"
    assert failed["status"]["code"] == 2


@asynccontextmanager
async def gateway(pair: tuple[Process, Process], url: str) -> AsyncIterator[tuple[Traces, httpx.AsyncClient]]:
    async with DisaggregatedInference(load_config(simulated_config(*pair))) as core:
        app = gateway_app(core, Keys())
        traces = Traces(app, Collector(url, {}))
        try:
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://gateway", timeout=60
            ) as client:
                yield traces, client
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


@pytest.mark.parametrize("trouble", ["down", "slow", "error"])
def test_requests_do_not_mind(
    pair: tuple[Process, Process], collector: FakeCollector, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"_EVERY_S": 0.02, "_MOST_WAITING": 4, "_AT_ONCE": 2, "_FLUSH_S": 0.3}.items():
        monkeypatch.setattr(tracing, name, value)
    collector.status = 500
    if trouble == "slow":
        collector.wait.clear()
    url = f"http://127.0.0.1:{free_port()}" if trouble == "down" else collector.url
    most = 0

    async def all_of_it() -> None:
        nonlocal most
        async with gateway(pair, url) as (traces, client):
            for _ in range(10):
                response = await client.post("/v1/chat/completions", json=ASK)
                assert response.status_code == 200
                most = max(most, len(traces._waiting))
            await until_counted(client, "dropped", 4 if trouble == "slow" else 10)
            assert (await counted(client))["sent"] == 0

    asyncio.run(all_of_it())
    assert most <= 4


def test_a_collector_that_comes_back(
    pair: tuple[Process, Process], collector: FakeCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "_EVERY_S", 0.02)

    async def all_of_it() -> None:
        async with gateway(pair, collector.url) as (_, client):
            for status, outcome in ((503, "dropped"), (200, "sent")):
                collector.status = status
                assert (await client.post("/v1/chat/completions", json=ASK)).status_code == 200
                await until_counted(client, outcome, 1)

    asyncio.run(all_of_it())
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
def test_headers_that_cannot_be_read_begin_a_trace(header: str) -> None:
    begun = came(header, "/", None)
    assert begun.sampled
    assert not begun.parent
    assert begun.trace != TRACE
    assert len(begun.trace) == 32


def test_later_versions_of_the_header_are_read_as_far_as_they_are_known() -> None:
    begun = came(f" cc-{TRACE}-{PARENT}-03-what-will-be ", "/", ("::1", 8080))
    assert (begun.trace, begun.parent, begun.sampled, begun.port) == (TRACE, PARENT, True, 8080)


def test_failovers_are_events_and_parts_stay_within_the_whole() -> None:
    record: dict[str, Any] = {
        "model": "m",
        "operation": "chat",
        "time": 1000.0,
        "total_time": 2.0,
        "outcome": "cancelled",
        "first_token_time": 0.0,
        "prompt_tokens": 9,
        "completion_tokens": 0,
        "cached_tokens": 0,
        "error": {"code": "cancelled"},
        "failovers": [{"node": "p1", "code": "peer_gone", "message": "it is gone", "at_s": 0.5, "stall_s": None}],
        "waterfall": [
            {"name": "failed", "start_s": -0.1, "seconds": 0.5, "node": "d1"},
            {"name": "decode", "start_s": 1.5, "seconds": 1.0, "node": "d1"},
        ],
    }
    body = json.loads(exported([spans_of(record, came("", "/api/chat", None), {}, "here")]))
    [[root], [failed, decode]] = [each["scopeSpans"][0]["spans"] for each in body["resourceSpans"]]
    assert "status" not in root
    assert plain(root["attributes"])["error.type"] == "cancelled"
    assert root["events"][0]["timeUnixNano"] == str(1000_500_000_000)
    assert plain(root["events"][0]["attributes"])["disagg.node"] == "p1"
    assert failed["status"]["code"] == 2
    assert failed["startTimeUnixNano"] == root["startTimeUnixNano"]
    assert decode["endTimeUnixNano"] == root["endTimeUnixNano"] == str(1002_000_000_000)


@pytest.mark.parametrize(("prefill", "read_s", "write_s"), [("p1", 0.0, 1.25), (None, 1.0, 2.0)])
def test_what_ran_beside_each_other_is_drawn_so(prefill: str | None, read_s: float, write_s: float) -> None:
    """A prefill node reads while the decode node still meets it; a node that reads for itself makes ready first."""
    record = RequestRecorder("r", "m")
    record.came_at -= 4.0
    option = Route(prefill=prefill, decode="d1", first_token_s=1.0, total_s=4.0)
    attempt = record.begin(option, "", "mlx")
    attempt.began_at, attempt.first_token_at = record.came_at, record.came_at + write_s
    told = {"admission": 0.25, "canary": 0.75, "queue": 0.25, "prefill": 0.75, "exposed_transfer": 0.5, "decode": 2.0}
    attempt.metrics = {f"{name}_time": seconds for name, seconds in told.items()}
    record.end()
    found = {phase.name: (round(phase.start_s, 6), phase.seconds) for phase in record.phases}
    assert found == {
        "admission": (0.0, 0.25),
        "canary": (0.25, 0.75),
        "prefill queue": (read_s, 0.25),
        "prefill": (read_s + 0.25, 0.75),
        "exposed transfer": (write_s, 0.5),
        "decode": (write_s + 0.5, 1.5),
    }


def test_where_traces_go() -> None:
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318/",
        "OTEL_EXPORTER_OTLP_HEADERS": "api-key=a%20b, other=c",
        "OTEL_SERVICE_NAME": "mine",
    }
    found = Collector("", environment)
    assert (found.url, found.service) == ("http://collector:4318/v1/traces", "mine")
    assert found.headers == {"api-key": "a b", "other": "c"}
    assert Collector("https://there", environment).url == "https://there/v1/traces"
    exact = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://there/exactly"}
    assert Collector("", environment | exact).url == "http://there/exactly"
    assert not Collector("", {}).url
    for wrong in ("collector:4317", "grpc://collector:4317", "http://[", "http://"):
        with pytest.raises(BadRequest, match="--otlp"):
            Collector(wrong, {})
