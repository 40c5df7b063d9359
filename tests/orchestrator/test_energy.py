"""Energy of a request: integrated from its nodes' power, divided between the requests of a machine, labelled."""

import asyncio
from typing import Any

import msgspec
import pytest

from disaggregated_inference.api import NodeStatus, Phase, Rate, Readings, RequestRecord
from disaggregated_inference.cluster import Policies, Server
from disaggregated_inference.orchestrator import (
    DisaggregatedInference,
    HistoryFilter,
    HistoryReader,
    comparisons,
    energy_by_node,
    energy_sums,
)
from disaggregated_inference.orchestrator.energy import Meters, PowerLog, price_per_hour, with_energy
from disaggregated_inference.orchestrator.history_record import HistoryRecord
from disaggregated_inference.orchestrator.single_machine import MachineFacts
from disaggregated_inference.orchestrator.uptime import Uptime


def server(name: str, host: str = "", **more: Any) -> Server:
    return Server(host=host or name, port=1, model="m", name=name, role="both", **more)


def log_of(*samples: tuple[float, float | None, int]) -> PowerLog:
    log = PowerLog()
    for at, power_w, working in samples:
        log.add(NodeStatus(working=working, readings=Readings(power_w=power_w, age_s=0.5)), now=at + 0.5)
    return log


def energy(servers: list[Server], logs: dict[str, PowerLog], *phases: Phase, **policies: Any) -> RequestRecord:
    return with_energy(RequestRecord(), Meters(servers, logs).shares(phases, 100.0), Policies(**policies))


PREFILL, DECODE = Phase("prefill", 0.0, 2.0, "p"), Phase("decode", 2.0, 8.0, "d")


def test_measured_power_is_integrated_over_the_phases() -> None:
    logs = {
        "p": log_of(*((100.0 + n, 300.0 if n < 2 else 50.0, int(n < 2)) for n in range(12))),
        "d": log_of(*((100.0 + n, 20.0 if n < 2 else 100.0 + n, int(n >= 2)) for n in range(12))),
    }
    found = energy([server("p"), server("d")], logs, PREFILL, DECODE)
    assert found.energy_source == "measured"
    decode_j = sum((100 + n) for n in range(2, 10))
    assert found.energy_j == pytest.approx(600 + decode_j, rel=0.01)
    assert found.energy_wh == pytest.approx((found.energy_j or 0) / 3600)
    assert [(share.node, share.phase, share.source) for share in found.energy] == [
        ("p", "prefill", "measured"),
        ("d", "decode", "measured"),
    ]
    assert found.cost is None, "no price is known"


def test_requests_that_run_at_once_divide_a_machine() -> None:
    alone = energy([server("d")], {"d": log_of(*((100.0 + n, 120.0, 1) for n in range(12)))}, DECODE)
    four = energy([server("d")], {"d": log_of(*((100.0 + n, 120.0, 4) for n in range(12)))}, DECODE)
    assert alone.energy_j == pytest.approx(960)
    assert four.energy_j == pytest.approx(240)
    nodes = [server("d", "one-host"), server("p", "one-host")]
    both = {
        "d": log_of(*((100.0 + n, 120.0, 1) for n in range(12))),
        "p": log_of(*((100.0 + n, None, 1) for n in range(12))),
    }
    assert energy(nodes, both, DECODE).energy_j == pytest.approx(480), "two nodes of one machine"


def test_a_short_request_is_not_charged_with_idle_power() -> None:
    """The only sample near it was taken before it began."""
    logs = {"d": log_of((90.0, 200.0, 2), (99.9, 30.0, 0))}
    short = Phase("decode", 0.1, 0.2, "d")
    assert energy([server("d")], logs, short).energy_j == pytest.approx(0.2 * 200)
    never = {"d": log_of((99.9, 30.0, 0))}
    assert energy([server("d")], never, short).energy_j == pytest.approx(0.2 * 30), "no busy moment is known"


def test_configured_watts_where_there_is_no_meter() -> None:
    nodes = [server("p", power_w=240), server("d", power_w=100)]
    found = energy(nodes, {}, PREFILL, DECODE)
    assert found.energy_source == "configured"
    assert found.energy_j == pytest.approx(480 + 800)
    found = energy(nodes, {"p": log_of((100.0, 300.0, 1), (101.0, 300.0, 1))}, PREFILL, DECODE)
    assert found.energy_source == "mixed"
    assert found.energy_j == pytest.approx(600 + 800)
    old = {"p": log_of((50.0, 300.0, 1)), "d": log_of((100.0, None, 1))}
    assert energy(nodes, old, PREFILL, DECODE).energy_source == "configured", "a meter that fell silent"


def test_unknown_energy_is_not_invented() -> None:
    found = energy([server("p", power_w=240), server("d")], {}, PREFILL, DECODE)
    assert (found.energy_j, found.energy_wh, found.energy_source) == (None, None, None)
    assert [share.node for share in found.energy] == ["p"]
    assert energy([], {}, PREFILL, DECODE) == RequestRecord(), "a node of an earlier config"
    assert "energy_j" not in found.metrics()


def test_cost_is_energy_and_the_machines_time() -> None:
    nodes = [server("p", power_w=360, price_per_hour=3.6), server("d", power_w=360, price=8766 * 7.2, lifetime_years=1)]
    assert price_per_hour(nodes[1]) == pytest.approx(7.2)
    found = energy(nodes, {}, PREFILL, DECODE, electricity_price_per_kwh=0.5)
    assert found.cost == pytest.approx(2 * 0.001 + 8 * 0.002 + 0.001 * 0.5)
    assert found.cost_without == ()
    assert energy([server("d", price=100)], {}, DECODE).cost == pytest.approx(100 / 4 / 8766 / 3600 * 8)


def test_readings_are_taken_once_and_bounded() -> None:
    log, status = PowerLog(), NodeStatus(working=1, readings=Readings(power_w=9.0, age_s=0.2))
    for _ in range(3):
        log.add(status, now=50.2)
    assert len(log) == 2  # one of all samples, one of a busy node's
    for n in range(2000):
        log.add(status, now=60.0 + n)
    assert len(log) == 2 * 900
    assert log.mean_busy_w() == 9


def test_the_comparison_with_one_machine_alone() -> None:
    records: list[dict[str, Any]] = [
        {"time": 1.0, "model": "m", "ok": True, "outcome": "ok", "kind": "disaggregated", "prefill_node": "p"}
        | {"decode_node": "d", "prompt_tokens": 1000, "cached_tokens": 0, "completion_tokens": 100, "total_time": 3.0}
        | {"prefill_time": 1.0, "decode_time": 2.0, "exposed_transfer_time": 0.25, "energy_j": 400.0}
        | {"energy": [{"node": "p", "phase": "prefill", "joules": 200.0, "source": "measured"}]}
        | {"time": at}
        for at in (1.0, 5.0)
    ]
    records.append({"time": 1.0, "kind": "local", "ok": True})
    facts = {
        "p": MachineFacts(busy_w=200, idle_w=40),
        "d": MachineFacts(prefill_rates=(Rate(size=512, tokens_per_s=100),), busy_w=100, idle_w=10),
    }
    with HistoryReader.of_records(map(HistoryRecord, records)) as reader:
        decode, prefill = comparisons(reader, HistoryFilter(), facts)
        bare, _ = comparisons(reader, HistoryFilter(), {})
        slow = {"d": MachineFacts(prefill_rates=(Rate(size=32, tokens_per_s=5),), busy_w=100)}
        guessed, _ = comparisons(reader, HistoryFilter(), slow)
        nodes = energy_by_node(reader, HistoryFilter())
    assert (decode.machine, decode.node, decode.requests, decode.together_s) == ("decode", "d", 2, 6.0)
    assert decode.together_j == pytest.approx(2 * (400 + (3 - 1) * 40 + (3 - 2) * 10))
    assert decode.alone_s == pytest.approx(2 * (10 + 2))
    assert decode.alone_j == pytest.approx(100 * 24)
    assert decode.together_cost is None, "no machine has a price"
    assert (prefill.machine, prefill.alone_s) == ("prefill", None)
    assert prefill.why.startswith("p has not measured its decode rate at ")
    assert (bare.idle_included, bare.alone_j) == (False, None)
    assert guessed.alone_s is None, "the rate of a short prompt says nothing of a long one"
    assert guessed.why == "d has not measured its prefill rate at 1000 tokens"
    assert nodes == {"p": {"measured_j": 400, "requests": 2}}


def test_requests_that_ran_at_once_count_the_machine_once() -> None:
    """Eight answers in one batch: the machine was busy for as long as one of them took, not eight times as long."""
    usual = {"model": "m", "ok": True, "outcome": "ok", "kind": "disaggregated", "prefill_node": "p"}
    usual |= {"decode_node": "d", "prompt_tokens": 100, "cached_tokens": 0, "completion_tokens": 100, "time": 10.0}
    usual |= {"total_time": 5.0, "prefill_time": 1.0, "decode_time": 4.0, "energy_j": 100.0}
    batch = usual | {"prefill_machine_time": 0.125, "decode_machine_time": 0.5}
    reads, writes = (Rate(size=64, tokens_per_s=100),), (Rate(size=1, tokens_per_s=10), Rate(size=8, tokens_per_s=80))
    facts = {
        "p": MachineFacts(decode_rates=writes, busy_w=300, price_per_hour=3600),
        "d": MachineFacts(prefill_rates=reads, busy_w=100, price_per_hour=7200),
    }
    with HistoryReader.of_records([HistoryRecord(batch)] * 8) as reader:
        decode, prefill = comparisons(reader, HistoryFilter(), facts, price_per_kwh=0.36)
    assert decode.together_s == 5.0
    assert decode.batch_size == pytest.approx(8)
    assert decode.alone_s == pytest.approx(8 * 1.0 + 4.0), "eight prompts one after the other, one batch"
    assert decode.alone_j == pytest.approx(100 * 12)
    assert decode.together_cost == pytest.approx(3 * 5 + 800 / 3.6e6 * 0.36)
    assert decode.alone_cost == pytest.approx(2 * 12 + 1200 / 3.6e6 * 0.36)
    assert prefill.alone_s == pytest.approx(1.0 + 800 / 80), "at the rate of a batch of eight"


def test_a_cost_says_what_it_lacks() -> None:
    priced, free = server("p", power_w=360, price_per_hour=3.6), server("d", power_w=360)
    found = energy([priced, free], {}, PREFILL, DECODE, electricity_price_per_kwh=0.5)
    assert found.cost == pytest.approx(2 * 0.001 + 0.001 * 0.5), "what is known"
    assert found.cost_without == ("price of d",)
    found = energy([priced, server("d", price_per_hour=7.2)], {}, PREFILL, DECODE)
    assert found.cost == pytest.approx(2 * 0.001 + 8 * 0.002)
    assert found.cost_without == ("energy",)
    assert energy([priced], {}, PREFILL).cost_without == ("electricity price",)
    assert energy([server("d")], {}, DECODE).cost_without == (), "no cost, no label"
    rows: list[dict[str, Any]] = [
        {"time": 1.0, "ok": True, "cost": 1.0, "cost_without": ["energy"]},
        {"time": 1.0, "ok": True, "cost": 2.0},
    ]
    with HistoryReader.of_records(map(HistoryRecord, rows)) as reader:
        total = energy_sums(reader, HistoryFilter()).total
    assert (total.cost, total.cost_partial) == (3.0, 1)


def test_a_node_keeps_the_power_that_its_status_tells() -> None:
    async def check() -> None:
        async with DisaggregatedInference({"decode_servers": [{"host": "127.0.0.1", "port": 1, "model": "m"}]}) as core:
            (node,) = (await core.start()).nodes.values()
            status = NodeStatus(status="healthy", working=1, readings=Readings(power_w=50.0, machine="a Mac"))
            node.update(msgspec.json.decode(msgspec.json.encode(status), type=NodeStatus))
            assert node.facts().busy_w == 50
            readings = node.summary().readings
            assert readings
            assert readings.machine == "a Mac"
            assert node.summary().working == 1
            node.lost("gone")
            assert node.summary().readings is None, "readings of a lost node are old"

    asyncio.run(check())


def test_uptime() -> None:
    moments = iter([0.0, 10.0, 30.0, 40.0])
    uptime = Uptime(lambda: next(moments))
    assert uptime.share is None
    for serves in (True, False, True, True):
        uptime.observe(serves)
    assert uptime.share == 0.5
