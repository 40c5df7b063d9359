"""The gateway's own paths: tokenize, readiness, cluster status, events, and metrics."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette

from disaggregated_inference.api import ClusterNode, ClusterStatus, ErrorDetail, Failover, RequestRecord, SlotStatus
from disaggregated_inference.cluster import load_config
from disaggregated_inference.errors import DisaggError, QueueFull
from disaggregated_inference.gateway.app import gateway_app
from disaggregated_inference.gateway.auth import Keys
from disaggregated_inference.gateway.event_stream import EventStream, Subscriber
from disaggregated_inference.gateway.metrics import STATUS_OF, GatewayMetrics
from disaggregated_inference.gateway.slo import TargetFigures, error_share, figures_of, parallel_efficiency, targets
from disaggregated_inference.models import ModelStore
from disaggregated_inference.orchestrator import DisaggregatedInference
from disaggregated_inference.timeouts import GatewayTimeouts
from tests.support.cluster import Process, free_port
from tests.support.gateway import served, simulated_config, simulated_pair

MODEL = "simulated:tiny"
AWAY: Any = {"decode_servers": [{"host": "127.0.0.1", "port": 9, "model": "away", "name": "d1"}]}


Ask = Callable[[DisaggregatedInference, httpx.AsyncClient], Awaitable[None]]
AskApp = Callable[[DisaggregatedInference, httpx.AsyncClient, Starlette], Awaitable[None]]


def run(config: Any, ask: Ask) -> None:
    run_with_app(config, lambda core, client, app: ask(core, client))


def run_with_app(config: Any, ask: AskApp) -> None:
    """For what no request can bring about."""

    async def all_of_it() -> None:
        async with DisaggregatedInference(load_config(config)) as core:
            transport = httpx.ASGITransport(app := gateway_app(core, Keys()))
            async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=30) as client:
                await ask(core, client, app)

    asyncio.run(all_of_it())


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Process, Process]]:
    with simulated_pair() as pair:
        yield pair


@pytest.fixture
def config(pair: tuple[Process, Process]) -> dict[str, Any]:
    found = simulated_config(*pair, electricity_price_per_kwh=0.3)
    for server in found["prefill_servers"] + found["decode_servers"]:
        server["power_w"] = 200
    return found


def test_tokenize_and_detokenize(config: dict[str, Any]) -> None:
    tokenizer = ModelStore().resolve(MODEL).tokenizer

    async def ask(core: DisaggregatedInference, client: httpx.AsyncClient) -> None:
        async def tokens(**body: Any) -> Any:
            return (await client.post("/tokenize", json={"model": "tiny-alias"} | body)).json()

        text = "Grüße [0300]</s>"
        found = await tokens(prompt=text)
        assert found == {"count": len(found["tokens"]), "max_model_len": 131072, "tokens": tokenizer.encode(text)}
        strings = (await tokens(prompt=text, return_token_strs=True))["token_strs"]
        assert (len(strings), strings[-1]) == (found["count"], "</s>")
        assert (await tokens(prompt="", add_special_tokens=False))["tokens"] == []
        messages = [{"role": "user", "content": "x"}]
        assert (await tokens(messages=messages))["tokens"] == tokenizer.encode_chat(messages)
        short = (await tokens(messages=messages, add_generation_prompt=False))["tokens"]
        assert tokenizer.encode_chat(messages)[: len(short)] == short
        words = tokenizer.encode("Grüße [0300]")
        back = await client.post("/detokenize", json={"model": MODEL, "tokens": words})
        assert back.json() == {"prompt": "Grüße [0300]"}
        back = await client.post("/detokenize", json={"model": MODEL, "tokens": found["tokens"]})
        assert back.json() == {"prompt": text}

    run(config, ask)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "x", "messages": []}, 400),
        ("/tokenize", {"prompt": 1}, 400),
        ("/tokenize", {"messages": [1]}, 400),
        ("/tokenize", {"messages": [{"role": "user"}]}, 400),
        ("/tokenize", {"prompt": "x", "add_special_tokens": True}, 400),
        ("/tokenize", {"prompt": "x", "model": "nothing"}, 404),
        ("/detokenize", {}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": [1024]}, 400),
        ("/detokenize", {"tokens": [1 << 70]}, 400),
        ("/detokenize", {"tokens": ["a"]}, 400),
        ("/detokenize", {"tokens": [True]}, 400),
    ],
)
def test_invalid_tokenize_requests_are_refused(config: dict[str, Any], path: str, body: Any, status: int) -> None:
    async def ask(core: DisaggregatedInference, client: httpx.AsyncClient) -> None:
        answer = await client.post(path, json=body)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]

    run(config, ask)


def test_a_gateway_without_nodes_is_healthy_and_not_ready() -> None:
    async def ask(core: DisaggregatedInference, client: httpx.AsyncClient) -> None:
        await core.health()
        assert (await client.get("/health")).status_code == 200
        answer = await client.get("/ready")
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert answer.json()["models"] == {"away": "nothing is up"}
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.get("/cluster")).json()["history"] == []

    run(AWAY, ask)


def test_a_gateway_is_ready_when_one_model_can_be_served(config: dict[str, Any]) -> None:
    config["decode_servers"].append({"host": "127.0.0.1", "port": free_port(), "model": "away", "name": "d9"})

    async def ask(core: DisaggregatedInference, client: httpx.AsyncClient, app: Starlette) -> None:
        await core.health()
        answer = await client.get("/ready")
        assert answer.status_code == 200
        assert answer.json()["models"] == {MODEL: "all up", "away": "nothing is up"}
        app.state.draining = True
        assert (await client.get("/ready")).json()["status"] == "draining"

    run_with_app(config, ask)


def test_the_cluster_as_json(config: dict[str, Any]) -> None:
    async def ask(core: DisaggregatedInference, client: httpx.AsyncClient) -> None:
        for _ in range(3):
            await core.generate(model=MODEL, prompt="x" * 200, max_tokens=4)
        found = (await client.get("/cluster")).json()
        assert {node["name"] for node in found["nodes"]} == {"p1", "d1"}
        assert len(found["history"]) == 3
        assert found["history"][0]["completion_tokens"] == 4
        goals = {target["name"]: target for target in found["targets"]}
        assert goals["end_to_end"]["met"]
        assert goals["errors"] == goals["errors"] | {"measured": 0, "met": True}
        assert goals["requests_per_second"]["measured"] == pytest.approx(3 / 60)
        assert goals["requests_per_kwh"]["measured"] > 0
        assert goals["cost_per_request"]["measured"] > 0
        assert goals["cost_per_request"]["met"] is None, "the machines have no price"
        assert goals["cost_per_request"]["what"].endswith("a lower bound, prices are missing")
        assert goals["uptime"]["measured"] in (None, 100), "None before the second poll"
        assert goals["failover"]["measured"] is None

    run(config, ask)


def test_targets_have_measured_values() -> None:
    now = 1000.0

    def record(time: float, total: float, **more: Any) -> TargetFigures:
        return figures_of(RequestRecord(time=time, total_time=total, **more))

    def failed(code: str, outcome: str = "failed") -> TargetFigures:
        return record(1, 1, ok=False, outcome=outcome, error=ErrorDetail(code))

    def stalled(*stalls: float | None) -> TargetFigures:
        return record(1, 1, failovers=tuple(Failover(node="d", code="", message="", stall_s=each) for each in stalls))

    at_once = [record(960, 10), record(960, 10), record(965, 15)]
    assert parallel_efficiency(at_once) == pytest.approx(35 / 20)
    assert parallel_efficiency([record(960, 2), record(990, 2)]) == pytest.approx(1)
    assert parallel_efficiency([]) is None
    assert error_share([]) is None
    right = [record(1, 1) for _ in range(8)]
    wrong = [failed("no_decode_node"), failed("made_up"), failed("bad_request"), failed("cancelled", "cancelled")]
    assert error_share(right + wrong) == pytest.approx(20)
    stalls = [stalled(0.5, None), stalled(7)]
    node = ClusterNode(name="d1", usable=True, role="decode", slots=SlotStatus(used=3, most=4))
    found = {each.name: each for each in targets([*at_once, *stalls, *wrong], [node], now)}
    assert (found["failover"].measured, found["failover"].met) == (7, False)
    assert (found["utilisation"].measured, found["utilisation"].met) == (75, True)
    assert found["requests_per_second"].measured == pytest.approx(3 / 60)
    nothing = targets([], [], now)
    assert all(each.measured is None and each.met is None for each in nothing)
    assert targets([figures_of(RequestRecord.of_row({"ok": True}))], [], now)  # a record from an older file


# Prometheus.


def samples(text: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def test_metrics_for_prometheus(config: dict[str, Any]) -> None:
    async def ask(core: DisaggregatedInference, client: httpx.AsyncClient) -> None:
        for _ in range(2):
            await core.generate(model="tiny-alias", prompt="x" * 300, max_tokens=6, ignore_eos=True)
        with pytest.raises(DisaggError):
            await core.generate(model=MODEL, prompt="x" * 200_000)
        task = asyncio.create_task(core.generate(model=MODEL, prompt="x", max_tokens=100_000, ignore_eos=True))
        await asyncio.sleep(0.3)
        task.cancel()
        await asyncio.wait({task})
        await core.health()  # so that what the nodes measured is known
        answer = await client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        found = samples(answer.text)
        labels = {"gen_ai_request_model": MODEL, "gen_ai_response_model": MODEL}
        labels |= {"gen_ai_provider_name": "disaggregated_inference", "gen_ai_operation_name": "text_completion"}
        (first,) = found["vllm:time_to_first_token_seconds_count"]
        assert first.labels == {"model_name": MODEL}
        by_error = {
            each.labels["error_type"]: each.value for each in found["gen_ai_server_request_duration_seconds_count"]
        }
        assert by_error == {"": 2, "context_too_long": 1, "cancelled": 1}
        usage = {each.labels["gen_ai_token_type"]: each for each in found["gen_ai_client_token_usage_sum"]}
        assert usage["input"].labels == labels | {"gen_ai_token_type": "input"}
        assert usage["input"].value >= 600
        outcomes = {each.labels["outcome"]: each.value for each in found["disagg_requests_total"]}
        assert outcomes == {"ok": 2, "refused": 1, "cancelled": 1}
        assert found["disagg_kv_transfer_bytes_total"][0].value > 0
        assert 0 <= found["disagg_overlap_ratio_sum"][0].value <= found["disagg_overlap_ratio_count"][0].value
        assert found["disagg_energy_wh_total"][0].value > 0
        assert found["disagg_cost_total"][0].value > 0
        worked = {(each.labels["node"], each.labels["phase"]): each.value for each in found["disagg_node_tokens_total"]}
        assert worked["p1", "prefill"] > 0
        assert worked["d1", "decode"] >= 12
        joules = sum(each.value for each in found["disagg_node_energy_joules_total"])
        assert joules == pytest.approx(3600 * found["disagg_energy_wh_total"][0].value, rel=0.01)
        assert {"vllm:request_prompt_tokens_sum", "vllm:request_inference_time_seconds_sum"} <= set(found)
        assert {each.labels["node"]: each.value for each in found["disagg_breaker_state"]} == {"p1": 0, "d1": 0}
        assert found["disagg_queue_waiting"][0].labels == {"model": MODEL}
        assert {"vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:prompt_tokens_total"} <= set(found)
        assert all(
            each.labels == {"prefill": "p1", "decode": "d1"} for each in found["disagg_link_goodput_bytes_per_second"]
        )

    run(config, ask)


def test_labels_are_bounded() -> None:
    async def check() -> None:
        core = DisaggregatedInference(load_config(AWAY))
        metrics = GatewayMetrics(lambda: core)
        counts = {"total_time": 1.0, "prompt_tokens": 1, "completion_tokens": 1}
        for number in range(50):
            record = RequestRecord(
                **counts,  # type: ignore[arg-type]
                model=f"m{number}",
                failovers=(Failover(node=f"n{number}", code=f"code_{number}", message="x", stall_s=1),),
                kind="fallback",
                finish_reason=f"r{number}",
                error=ErrorDetail(f"e{number}", "x"),
            )
            metrics.ended(record)
        failover = Failover(node="d1", code="unreachable", message="x")
        metrics.ended(RequestRecord(**counts, model="away", failovers=(failover,)))  # type: ignore[arg-type]
        found = samples((await metrics.text()).decode())
        await core.aclose()
        values = {
            value for each in found.values() for sample in each for key, value in sample.labels.items() if key != "le"
        }
        assert values <= {
            "away",
            "decode",
            "other",
            "ok",
            "unreachable",
            "d1",
            "input",
            "output",
            "disaggregated_inference",
            "",
        }
        assert not {"disagg_energy_wh_total", "disagg_cost_total"} & set(found)  # unknown
        assert {each.labels["reason"]: each.value for each in found["disagg_fallback_total"]} == {"other": 50}
        assert {each.labels["code"]: each.value for each in found["disagg_failover_total"]} == {
            "other": 50,
            "unreachable": 1,
        }

    asyncio.run(check())


def test_every_error_has_a_code() -> None:
    assert STATUS_OF["kv_memory_full"] == 503
    assert STATUS_OF["rate_limited"] == 429
    assert STATUS_OF["peer_failed"] == 502
    assert len(STATUS_OF) > 35


def test_two_gateways_have_separate_registries() -> None:
    cores = [DisaggregatedInference(load_config(AWAY)) for _ in range(2)]
    one, other = (GatewayMetrics(lambda core=core: core) for core in cores)  # type: ignore[misc]
    assert one.registry is not other.registry


# Events.


async def next_events(events: Any) -> list[tuple[str, Any]]:
    """Those that are sent together."""
    async with asyncio.timeout(10):
        blocks = (await anext(events)).decode().strip().split("\n\n")
    pairs = [block.split("\n") for block in blocks]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in pairs]


async def next_event(events: Any) -> tuple[str, Any]:
    (found,) = await next_events(events)
    return found


async def next_request(events: Any) -> Any:
    while True:
        if found := [content for name, content in await next_events(events) if name == "request"]:
            return found[-1]


def test_events(config: dict[str, Any]) -> None:
    async def ask(core: DisaggregatedInference, client: httpx.AsyncClient) -> None:
        feed = EventStream(lambda: core, GatewayTimeouts(event_poll_s=0.05, event_quiet_s=0.3, event_batch_s=0))
        events = feed.listen()
        name, status = await next_event(events)
        assert name == "status"
        assert {node["name"] for node in status["nodes"]} == {"p1", "d1"}
        await core.generate(model=MODEL, prompt="x", max_tokens=2)
        assert (await next_request(events))["completion_tokens"] == 2
        await events.aclose()
        assert not feed.subscribers
        assert feed._polling is None

    run(config, ask)


def test_events_over_http(config: dict[str, Any]) -> None:
    with served(config) as url, httpx.stream("GET", f"{url}/cluster/events", timeout=10) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        names = (line for line in stream.iter_lines() if line.startswith("event: "))
        assert next(names) == "event: status"
        body = {"model": MODEL, "prompt": "x", "stream": False, "options": {"num_predict": 2}}
        assert httpx.post(f"{url}/api/generate", json=body).status_code == 200
        assert "event: request" in (next(names) for _ in range(5))
        assert httpx.get(f"{url}/metrics").status_code == 200


def test_a_quiet_cluster_sends_few_events() -> None:
    async def ask(core: DisaggregatedInference, client: httpx.AsyncClient) -> None:
        await core.health()
        feed = EventStream(lambda: core, GatewayTimeouts(event_poll_s=0.01))
        events = feed.listen()
        await next_event(events)
        await next_event(events)
        waiting = asyncio.create_task(next_event(events))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        feed.close()
        with pytest.raises(StopAsyncIteration):
            await waiting

    run(AWAY, ask)


def test_a_subscriber_that_does_not_read_is_dropped() -> None:
    async def ask(core: DisaggregatedInference, client: httpx.AsyncClient) -> None:
        feed = EventStream(lambda: core, GatewayTimeouts(event_batch_s=0))
        slow, quick = feed.listen(), feed.listen()
        await next_event(slow)
        await next_event(quick)
        read = 0
        for number in range(2000):
            feed.ended(RequestRecord(seed=number))
            read += (await next_request(quick))["seed"] == number
        assert read == 2000
        assert len(feed.subscribers) == 1
        with pytest.raises(StopAsyncIteration):
            await next_event(slow)
        await quick.aclose()

    run(AWAY, ask)


def test_events_that_come_together_are_sent_together() -> None:
    async def ask(core: DisaggregatedInference, client: httpx.AsyncClient) -> None:
        feed = EventStream(lambda: core, GatewayTimeouts(event_batch_s=0.01, event_poll_s=100))
        streams = [feed.listen(), feed.listen()]
        for events in streams:
            await next_event(events)
        for number in range(100):
            feed.ended(RequestRecord(seed=number))
        sent = [await anext(events) for events in streams]
        assert sent[0] == sent[1]
        assert sent[0].count(b"event: request") == 100
        for events in streams:
            await events.aclose()

    run(AWAY, ask)


def test_subscribers_that_come_together_share_one_status(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(core: DisaggregatedInference, client: httpx.AsyncClient) -> None:
        asked, status = [], core.cluster_status

        async def counted() -> ClusterStatus:
            asked.append(1)
            return await status()

        monkeypatch.setattr(core, "cluster_status", counted)
        feed = EventStream(lambda: core, GatewayTimeouts(event_poll_s=100))
        streams = [feed.listen() for _ in range(50)]
        firsts = [await anext(events) for events in streams]
        assert len(set(firsts)) == len(asked) == 1
        for events in streams:
            await events.aclose()

    run(AWAY, ask)


def test_subscribers_are_limited() -> None:
    async def ask(core: DisaggregatedInference, client: httpx.AsyncClient, app: Starlette) -> None:
        feed = EventStream(lambda: core, max_subscribers=1)
        app.state.feed = feed
        events = feed.listen()
        await next_event(events)
        assert (await client.get("/cluster/events")).status_code == 503
        with pytest.raises(QueueFull):
            feed.require_room()
        await events.aclose()
        feed.require_room()

    run_with_app(AWAY, ask)


def test_subscribers_that_come_at_once_are_limited() -> None:
    """All of them find room, because none has begun to listen yet."""

    async def ask(core: DisaggregatedInference, client: httpx.AsyncClient) -> None:
        feed = EventStream(lambda: core, max_subscribers=4)
        streams = [feed.listen() for _ in range(20)]
        firsts = await asyncio.gather(*(anext(events, b"") for events in streams))
        assert [bool(first) for first in firsts] == [True] * 4 + [False] * 16
        assert len(feed.subscribers) == 4
        for events in streams:
            await events.aclose()

    run(AWAY, ask)


def test_one_key_does_not_take_all_event_streams() -> None:
    async def ask(core: DisaggregatedInference, client: httpx.AsyncClient) -> None:
        feed, streams = EventStream(lambda: core, max_subscribers=8), []

        async def listen(caller: str | None) -> None:
            feed.require_room(caller)
            streams.append(feed.listen(caller))
            assert await anext(streams[-1])

        for name in ("ann", "bob", "cy"):
            for _ in range(2):
                await listen(name)
            with pytest.raises(QueueFull, match="this key has 2 event streams"):
                feed.require_room(name)
        with pytest.raises(QueueFull, match="in use"):
            feed.require_room("dan")
        for _ in range(2):  # an operator, who sees all
            await listen(None)
        with pytest.raises(QueueFull, match="in use"):
            feed.require_room(None)
        for events in streams:
            await events.aclose()

    run(AWAY, ask)


def test_events_for_a_subscriber_that_does_not_read_are_bounded_in_bytes() -> None:
    async def fill() -> None:
        subscriber, event = Subscriber(), b"x" * 100_000
        for _ in range(20):
            assert subscriber.put(event)
        assert not subscriber.put(event)
        assert await subscriber.take() == b"", "its stream ends"
        large = Subscriber()
        assert large.put(b"x" * 5_000_000), "one event may be larger: a cluster with many nodes"
        assert await large.take()
        assert large.put(event)

    asyncio.run(fill())
