"""`/cluster/history`, `/series`, `/requests/{id}`, `/targets` and `/energy` of a gateway with simulated nodes."""

import asyncio
import csv
import io
import json
import secrets
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from disaggregated_inference.cli import history as history_command
from disaggregated_inference.cli.history import HistoryOptions
from disaggregated_inference.cluster import load_config
from disaggregated_inference.errors import ContextTooLong
from disaggregated_inference.gateway.alarms import alarms
from disaggregated_inference.gateway.app import gateway_app
from disaggregated_inference.gateway.auth import Keys
from disaggregated_inference.gateway.key_file import new_key
from disaggregated_inference.orchestrator import (
    DisaggregatedInference,
    HistoryFilter,
    HistoryReader,
    ModelVerdict,
)
from disaggregated_inference.orchestrator.history_record import HistoryRecord
from tests.support.cluster import Process
from tests.support.gateway import simulated_config, simulated_pair
from tests.support.waiting import until_async

pytestmark = pytest.mark.slow

MODEL = "simulated:tiny"
Ask = Callable[[DisaggregatedInference, httpx.AsyncClient], Awaitable[None]]


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Process, Process]]:
    with simulated_pair() as pair:
        yield pair


@pytest.fixture(params=["file", "memory"])
def config(pair: tuple[Process, Process], request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    file = str(tmp_path / "h.sqlite") if request.param == "file" else ""
    found = simulated_config(*pair, electricity_price_per_kwh=0.3, history_file=file, local="never")
    for server in found["prefill_servers"] + found["decode_servers"]:
        server["power_w"] = 200
    found["links"] = [{"prefill": "p1", "decode": "d1", "gbps": 10}]
    return found


def run(config: Any, ask: Ask, keys: Keys | None = None) -> None:
    async def all_of_it() -> None:
        async with DisaggregatedInference(load_config(config)) as core:
            transport = httpx.ASGITransport(gateway_app(core, keys or Keys()))
            async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=30) as client:
                await ask(core, client)

    asyncio.run(all_of_it())


async def written(client: httpx.AsyncClient, count: int, **headers: str) -> dict[str, Any]:
    """What the history shows, once all requests are in the file."""
    async with asyncio.timeout(30):
        while True:
            found: dict[str, Any] = (await client.get("/cluster/history", headers=headers)).json()
            if len(found["requests"]) >= count:
                return found
            await asyncio.sleep(0.02)


def test_requests_and_their_figures(config: dict[str, Any]) -> None:
    async def ask(core: DisaggregatedInference, client: httpx.AsyncClient) -> None:
        for length in (200, 300, 400):
            await core.generate(model=MODEL, prompt="x" * length, max_tokens=4)
        history = await written(client, 3)
        assert [row["prompt_tokens"] for row in history["requests"]] == [400, 300, 200]
        assert "waterfall" not in history["requests"][0]
        assert (history["more"], history["kept"]["requests"]) == (False, 3)
        short = (await client.get("/cluster/history?limit=1&full=1&node=d1&model=tiny-alias")).json()
        assert (len(short["requests"]), short["more"]) == (1, True)
        assert short["requests"][0]["waterfall"]
        series = (await client.get("/cluster/series?range=5m&step=1m")).json()
        assert (series["models"], series["nodes"], series["step_s"]) == ([MODEL], ["p1", "d1"], 60)
        assert sum(filter(None, series["series"]["requests"])) == 3
        assert all(len(values) == len(series["times"]) for values in series["series"].values())
        targets = (await client.get("/cluster/targets")).json()
        measured = {each["name"]: each["measured"] for each in targets["targets"]}
        assert measured["errors"] == 0
        assert measured["requests_per_kwh"] > 0
        assert {each["name"]: each["state"] for each in targets["alarms"]}["prefill_down"] == "ok"
        energy = (await client.get("/cluster/energy")).json()
        assert energy["total"]["requests"] == energy["models"][MODEL]["requests"] == 3

    run(config, ask)


def test_one_request_in_full(config: dict[str, Any]) -> None:
    async def ask(core: DisaggregatedInference, client: httpx.AsyncClient) -> None:
        fresh = secrets.token_hex(500)  # no node has it cached
        await core.generate(model=MODEL, prompt=fresh, max_tokens=4, request_id="mine")
        found = (await client.get("/cluster/requests/mine")).json()
        row = found["request"]
        assert sum(phase["seconds"] for phase in row["waterfall"]) == pytest.approx(row["total_time"])
        assert row["plan"]
        assert found["real"] == {"first_token_s": row["first_token_time"], "total_s": row["total_time"]}
        assert found["predicted"]["first_token_s"] > 0
        transfer = found["transfer"]
        assert transfer["bytes"] == row["kv_bytes"] > 0
        assert 0 <= transfer["hidden_s"] <= transfer["seconds"] <= transfer["fetch_s"], "without waiting"
        assert transfer["bytes_per_s"] == pytest.approx(transfer["bytes"] / transfer["seconds"])
        assert transfer["line_rate_bytes_s"] == 1.25e9
        missing = await client.get("/cluster/requests/none")
        assert missing.status_code == 404
        assert "the history has no request 'none'" in missing.json()["error"]["message"]

    run(config, ask)


@pytest.mark.parametrize("config", ["file"], indirect=True)  # the command reads the file
def test_the_command_exports_what_the_gateway_answers(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every field of every record as JSON, every column as CSV, of real requests and a failed one."""

    async def ask(core: DisaggregatedInference, client: httpx.AsyncClient) -> None:
        await core.generate(model=MODEL, prompt=secrets.token_hex(300), max_tokens=4, caller="ann")
        await core.generate(model=MODEL, prompt="x", max_tokens=2)
        with pytest.raises(ContextTooLong):
            await core.generate(model=MODEL, prompt="x", max_tokens=100_000_000)
        await written(client, 3)
        found = (await client.get("/cluster/history?full=1")).json()["requests"]
        assert [row["ok"] for row in found] == [False, True, True]
        assert (found[2]["caller"], found[2]["method"]) == ("ann", "disaggregated_simulated")
        path = tmp_path / "cluster.json"
        path.write_text(json.dumps(config))
        history_command.run(HistoryOptions(config=str(path), as_json=True, since="1h"))
        assert json.loads(capsys.readouterr().out) == found
        history_command.run(HistoryOptions(config=str(path), as_csv=True))
        rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))[::-1]
        for row, record in zip(rows, found, strict=True):
            own = record | {"time": datetime.fromtimestamp(int(record["time"]), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
            own |= {"error": (record.get("error") or {}).get("code"), "cost_without": ", ".join(record["cost_without"])}
            assert row == {name: "" if own.get(name) is None else str(own[name]) for name in row}
        assert set(rows[0]) <= {*found[0], *found[-1]}, "no column is of a field that records do not have"

    run(config, ask)


def test_keys_see_their_own_requests_and_operators_all(config: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    headers = {
        name: {"x-api-key": new_key(name, file, operator=name == "root" or None)} for name in ("alice", "bob", "root")
    }

    async def ask(core: DisaggregatedInference, client: httpx.AsyncClient) -> None:
        for name in ("alice", "bob"):
            await core.generate(model=MODEL, prompt="x", max_tokens=2, caller=name, request_id=name)
        rows = (await written(client, 2, **headers["root"]))["requests"]
        assert [row["caller"] for row in rows] == ["bob", "alice"]
        (own,) = (await client.get("/cluster/history", headers=headers["alice"])).json()["requests"]
        assert own["request_id"] == "alice"
        assert "caller" not in own
        for name, status in (("alice", 200), ("bob", 404), ("root", 200)):
            assert (await client.get("/cluster/requests/alice", headers=headers[name])).status_code == status
        refused = await client.get("/cluster/history?caller=bob", headers=headers["alice"])
        assert refused.status_code == 403
        assert "need an operator's key" in refused.json()["error"]["message"]
        energy = (await client.get("/cluster/energy", headers=headers["alice"])).json()
        assert (energy["total"]["requests"], [*energy["callers"]]) == (1, ["alice"])
        for name, count in (("alice", 1), ("root", 2)):  # in steps of a second, figures of all would be single requests
            series = (await client.get("/cluster/series?range=5m&step=1s", headers=headers[name])).json()
            assert sum(filter(None, series["series"]["requests"])) == count
            history = (await client.get("/cluster/history", headers=headers[name])).json()
            assert history["kept"]["requests"] == count
            assert ["number" in row for row in history["requests"]] == [name == "root"] * count
        energy = (await client.get("/cluster/energy", headers=headers["root"])).json()
        assert [*energy["callers"]] == ["alice", "bob"]
        assert (await client.get("/cluster/series")).status_code == 401

    run(config, ask, Keys.load(file))


@pytest.mark.parametrize(
    ("query", "status", "message"),
    [
        ("series?range=9y", 400, "range must be a number with s, m, h or d, such as 15m or 24h"),
        ("series?range=0s", 400, "range must be"),
        ("series?range=1h&since=5m", 400, "give range or since, not both"),
        ("series?since=yesterday", 400, "since must be how long ago (a number with s, m, h or d"),
        ("series?since=1h&until=2h", 400, "since must be before until"),
        ("series?since=1", 400, "longer than 400 days"),
        ("series?step=x", 400, "step must be"),
        ("series?node=zz", 400, "no node has this name; there are p1, d1"),
        ("series?model=zz", 404, 'no model "zz"'),
        ("history?limit=0", 400, "limit must be a number from 1 to 1000"),
        ("history?limit=-1", 400, "limit must be"),
        ("history?outcome=good", 400, "outcome must be one of ok, failed, refused, cancelled"),
        ("history?sinc=1", 400, "sinc is no parameter of this path: use range, since"),
    ],
)
def test_wrong_queries_are_refused(pair: Any, query: str, status: int, message: str) -> None:
    async def ask(core: DisaggregatedInference, client: httpx.AsyncClient) -> None:
        answer = await client.get(f"/cluster/{query}")
        assert answer.status_code == status
        assert message in answer.json()["error"]["message"]

    run(simulated_config(*pair), ask)


def test_readings_of_the_nodes(pair: Any) -> None:
    async def ask(core: DisaggregatedInference, client: httpx.AsyncClient) -> None:
        async def read() -> dict[str, Any]:
            return {node["name"]: node["readings"] for node in (await client.get("/cluster")).json()["nodes"]}

        async def all_told() -> bool:
            return all((await read()).values())

        assert await until_async(all_told)
        for readings in (await read()).values():
            assert 0 < readings["memory_used_bytes"] < readings["memory_total_bytes"]
            assert readings["power_w"] is None
            assert readings["missing"]["power_w"] == "the simulated engine computes nothing"
        await core.generate(model=MODEL, prompt="x", max_tokens=2)
        metrics = (await client.get("/metrics")).text
        assert 'disagg_machine_memory_used_bytes{node="p1"}' in metrics
        assert "disagg_machine_power_watts{" not in metrics, "no series is better than a wrong one"
        assert "energy_j" not in core.history.recent(1)[0]

    run(simulated_config(*pair), ask)


def test_many_who_ask_the_same_cause_one_reading(pair: Any) -> None:
    async def ask(core: DisaggregatedInference, client: httpx.AsyncClient) -> None:
        opened, real = [], core.history.reader
        core.history.reader = lambda: opened.append(1) or real()  # type: ignore[method-assign, func-returns-value]
        answers = await asyncio.gather(*(client.get("/cluster/series?range=1h") for _ in range(50)))
        assert len({answer.text for answer in answers}) == len(opened) == 1

    run(simulated_config(*pair), ask)


def test_a_history_that_cannot_be_read(pair: Any, tmp_path: Path) -> None:
    file = tmp_path / "h.sqlite"

    async def ask(core: DisaggregatedInference, client: httpx.AsyncClient) -> None:
        with closing(sqlite3.connect(file)) as database:
            database.execute("DROP TABLE requests")
        answer = await client.get("/cluster/series")
        assert answer.status_code == 503
        message = "the history cannot be read: no such table: requests; ask for a shorter time, or later"
        assert answer.json()["error"]["message"] == message
        file.unlink()
        answer = await client.get("/cluster/series")
        assert answer.status_code == 503
        assert "the history file cannot be opened" in answer.json()["error"]["message"]

    run(simulated_config(*pair, history_file=str(file)), ask)


def test_alarms_tell_when_disaggregation_does_not_happen() -> None:
    def states(records: list[dict[str, Any]], verdict: ModelVerdict = ModelVerdict.ALL_UP) -> dict[str, str]:
        with HistoryReader.of_records(map(HistoryRecord, records)) as reader:
            return {each.name: each.state for each in alarms(reader, HistoryFilter(), {"qwen": verdict})}

    right = {"time": 1.0, "ok": True, "outcome": "ok", "kind": "disaggregated", "prompt_tokens": 100}
    right |= {"prompt_tokens_recomputed": 0, "kv_bytes": 5, "exposed_transfer_time": 0.1}
    fine = {"prompt_recomputed": "ok", "fallback_share": "ok", "slow_transfers": "ok", "prefill_down": "ok"}
    assert states([right] * 20) == fine
    assert states([right] * 9)["prompt_recomputed"] == "unknown", "too few"
    assert states([right] * 19 + [right | {"prompt_tokens_recomputed": 100}])["prompt_recomputed"] == "alarm"
    fallback = right | {"kind": "fallback", "kv_bytes": None}
    assert states([right] * 18 + [fallback] * 2)["fallback_share"] == "alarm"
    assert states([right] * 18 + [right | {"exposed_transfer_time": 1.5}] * 2)["slow_transfers"] == "alarm"
    assert states([right] * 20, ModelVerdict.PREFILL_DOWN) == fine | {"prefill_down": "alarm"}
    local = right | {"kind": "local", "prompt_tokens_recomputed": 100, "kv_bytes": None}
    assert states([local] * 20)["prompt_recomputed"] == "unknown", "a decode node reads prompts itself by choice"
