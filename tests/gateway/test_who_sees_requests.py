"""Where keys are needed, `/cluster` and its events show a key its own requests only, unless it is an operator's."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from disaggregated_inference.api import RequestRecord
from disaggregated_inference.cli.main import app
from disaggregated_inference.cluster import load_config
from disaggregated_inference.gateway.app import gateway_app
from disaggregated_inference.gateway.auth import Keys
from disaggregated_inference.gateway.event_stream import EventStream
from disaggregated_inference.gateway.key_file import KeyLimits, new_key, read_keys
from disaggregated_inference.orchestrator import DisaggregatedInference, History
from tests.support.gateway import simulated_config, simulated_pair

AWAY: Any = {"decode_servers": [{"host": "127.0.0.1", "port": 9, "model": "away", "name": "d1"}]}
LIMITS = {"ann": KeyLimits(), "bob": KeyLimits(), "root": KeyLimits(operator=True)}


@pytest.mark.slow
def test_a_key_sees_its_own_requests(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    keys = {name: new_key(name, file, **limits) for name, limits in LIMITS.items()}

    async def seen(client: httpx.AsyncClient, name: str) -> list[Any]:
        answer = await client.get("/cluster", headers={"x-api-key": keys[name]})
        assert answer.status_code == 200, answer.text
        status = answer.json()
        is_operator = name == "root"
        assert status["sees_all"] is is_operator
        assert status.get("served", {}).get("ok") == (2 if is_operator else None), "not even how many there are"
        assert ("latency" in status) is is_operator
        assert status["summary"]["combined"]["answered"] == len(status["history"])
        assert all("caller" not in record for record in status["history"])
        assert all(("number" in record) is is_operator for record in status["history"])
        return [record["request_id"] for record in status["history"]]

    async def run(config: Any) -> None:
        async with DisaggregatedInference(load_config(config)) as core:
            transport = httpx.ASGITransport(gateway_app(core, Keys.load(file)))
            async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=120) as client:
                for name in ("ann", "bob"):
                    headers = {"x-api-key": keys[name], "x-request-id": f"of-{name}"}
                    body = {"prompt": "Hello", "max_tokens": 2}
                    answer = await client.post("/v1/completions", json=body, headers=headers)
                    assert answer.status_code == 200, answer.text
                found = [await seen(client, name) for name in LIMITS]
        assert found == [["of-ann"], ["of-bob"], ["of-bob", "of-ann"]]

    with simulated_pair() as pair:
        asyncio.run(run(simulated_config(*pair)))


def test_events_of_requests_reach_their_caller() -> None:
    async def run() -> None:
        async with DisaggregatedInference(load_config(AWAY)) as core:
            feed = EventStream(lambda: core)
            streams = {name: feed.listen(name) for name in ("ann", "bob", None)}
            for stream in streams.values():
                assert (await anext(stream)).startswith(b"event: status")
            feed.ended(RequestRecord(request_id="of-ann", caller="ann"))
            feed.ended(RequestRecord(request_id="of-bob", caller="bob"))
            feed.ended(RequestRecord(request_id="of-no-key"))
            queued = {each.caller: _requests(each.events) for each in feed.subscribers}
            assert queued == {"ann": ["of-ann"], "bob": ["of-bob"], None: ["of-ann", "of-bob", "of-no-key"]}
            core.history.add({"ok": True, "time": 1.0, "total_time": 2.0, "model": "away"}, "ann")
            feed.send_summary()
            answered = {each.caller: _answered(each.events) for each in feed.subscribers}
            assert answered == {"ann": [1], "bob": [0], None: [1]}
            for stream in streams.values():
                await stream.aclose()

    asyncio.run(run())


@pytest.mark.parametrize("change", ["removed", "no operator"])
def test_a_stream_ends_with_its_key(tmp_path: Path, change: str) -> None:
    """A stolen operator's key is taken out of the file, and its open stream shows the requests of all no longer."""
    file, fresh = tmp_path / "keys.json", tmp_path / "fresh.json"
    key = new_key("root", file, operator=True)
    new_key("ann", file)
    entries = json.loads(file.read_text())["keys"]
    kept = entries[1:] if change == "removed" else [entries[0] | {"operator": False}, entries[1]]
    fresh.write_text(json.dumps({"keys": kept}))

    async def run() -> None:
        async with DisaggregatedInference(load_config(AWAY)) as core:
            keys = Keys.load(file)
            app = gateway_app(core, keys)
            asked = {"type": "http", "method": "GET", "path": "/cluster/events", "raw_path": b"/cluster/events"}
            scope = asked | {"query_string": b"", "headers": [(b"x-api-key", key.encode())], "http_version": "1.1"}
            sent: asyncio.Queue[Any] = asyncio.Queue()
            serving = asyncio.create_task(app(scope, asyncio.Event().wait, sent.put))  # type: ignore[arg-type]
            assert (await sent.get())["status"] == 200
            assert (await sent.get())["body"].startswith(b"event: status")
            app.state.feed.ended(RequestRecord(request_id="first", caller="ann"))
            assert b'"first"' in (await sent.get())["body"]
            keys.reload(fresh)
            app.state.feed.ended(RequestRecord(request_id="second", caller="ann"))
            assert await sent.get() == {"type": "http.response.body", "body": b"", "more_body": False}
            await serving
            assert not app.state.feed.subscribers

    asyncio.run(run())


def _answered(events: "asyncio.Queue[bytes | None]") -> list[int]:
    found = [events.get_nowait() or b"" for _ in range(events.qsize())]
    contents = [event.partition(b"data: ")[2] for event in found if event.startswith(b"event: summary")]
    return [json.loads(content)["combined"]["answered"] for content in contents]


def _requests(events: "asyncio.Queue[bytes | None]") -> list[str]:
    found = [events.get_nowait() or b"" for _ in range(events.qsize())]
    contents = [event.partition(b"data: ")[2] for event in found if event.startswith(b"event: request")]
    assert not any(b"caller" in content for content in contents)
    return [json.loads(content)["request_id"] for content in contents]


def test_the_caller_outlives_a_restart(tmp_path: Path) -> None:
    file = str(tmp_path / "history.db")
    history = History(5, file)
    history.add({"n": 1}, "ann")
    history.add({"n": 2})
    history.close()
    again = History(5, file)
    assert [record["n"] for record in again.recent(5, caller="ann")] == [1]
    assert again.recent(5, caller="bob") == []
    assert [set(record) for record in again.recent(5)] == [{"n", "time"}] * 2
    again.close()


def test_the_command_makes_an_operators_key(tmp_path: Path) -> None:
    for name, options in (("root", ["--operator"]), ("ann", [])):
        command = ["gateway", "key", name, "--file", str(tmp_path / "keys.json"), *options]
        assert CliRunner().invoke(app, command).exit_code == 0
    assert [(key.name, key.operator) for key in read_keys(tmp_path / "keys.json")] == [("root", True), ("ann", False)]
