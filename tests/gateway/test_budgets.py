"""Budgets of API keys: what they count, when they refuse, and how each API says so."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from disaggregated_inference.api import RequestRecord
from disaggregated_inference.cluster import load_config
from disaggregated_inference.errors import (
    ConcurrencyExceeded,
    RateLimited,
    TokensPerDayExceeded,
    TokensPerMinuteExceeded,
)
from disaggregated_inference.gateway.app import gateway_app
from disaggregated_inference.gateway.auth import Keys
from disaggregated_inference.gateway.budgets import Budget, Window
from disaggregated_inference.gateway.key_file import Key, KeyLimits, new_key
from disaggregated_inference.orchestrator import DisaggregatedInference
from tests.support.cluster import Process
from tests.support.gateway import simulated_config, simulated_pair
from tests.support.recorded_ollama import Front, RecordedOllama
from tests.support.waiting import until

MODEL = "simulated:tiny"
AWAY: Any = {"decode_servers": [{"host": "127.0.0.1", "port": 9, "model": MODEL, "name": "d1"}]}  # no node runs
USER = [{"role": "user", "content": "one two three"}]
# Each API's request for at most 4 tokens.
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 4},
    "/v1/completions": {"prompt": "one two three", "max_tokens": 4},
    "/v1/responses": {"input": "one two three", "max_output_tokens": 4},
    "/v1/messages": {"messages": USER, "max_tokens": 4},
    "/api/chat": {"messages": USER, "options": {"num_predict": 4}},
    "/api/generate": {"prompt": "one two three", "options": {"num_predict": 4}},
}


class Clock:
    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def key(**limits: Any) -> Key:
    return Key(name="ann", key_hash="0" * 64, **limits)


# Windows and budgets


def test_a_window_forgets_at_its_end_and_keeps_what_was_too_much() -> None:
    clock = Clock(600.0)
    window = Window(100, 60.0, clock)
    window.spend(99)
    assert (window.left(), window.wait_s()) == (1, 0.0)
    window.spend(251)
    clock.now = 610.0
    assert (window.left(), window.wait_s()) == (0, 170.0), "250 are too many for this window and two more"
    clock.now = 661.0
    assert window.wait_s() == 119.0
    clock.now = 780.0
    assert (window.left(), window.wait_s()) == (50, 0.0)
    clock.now = 1e9
    assert window.left() == 100


def test_a_day_begins_at_midnight() -> None:
    clock = Clock(86400.0 * 20000 + 3600)
    window = Window(10, 86400.0, clock)
    window.spend(10)
    assert window.wait_s() == 82800.0
    clock.now += 82800.0
    assert window.wait_s() == 0.0


def test_a_clock_that_is_set_back_takes_nothing_away() -> None:
    clock = Clock(600.0)
    window = Window(100, 60.0, clock)
    window.spend(100)
    clock.now = 0.0
    assert 0 < window.wait_s() <= 60.0
    clock.now = 60.0
    assert window.wait_s() == 0.0


def test_each_limit_has_its_error() -> None:
    clock = Clock(600.0)
    budget = Budget(key(concurrency=1, per_minute=2, tokens_per_minute=10, tokens_per_day=30), clock, clock)
    budget.begin()
    with pytest.raises(ConcurrencyExceeded, match="'ann' is limited to 1 requests at once") as busy:
        budget.begin()
    assert (busy.value.status, busy.value.retry_after_s, busy.value.caller) == (429, 1, "ann")
    budget.end()
    budget.spend(10)
    with pytest.raises(TokensPerMinuteExceeded, match="10 tokens a minute") as minute:
        budget.begin()
    assert minute.value.retry_after_s == 60
    clock.now = 660.0
    budget.begin()
    budget.end()
    budget.spend(20)
    with pytest.raises(TokensPerDayExceeded, match="30 tokens a day") as day:
        budget.begin()
    assert day.value.retry_after_s == 86400 - 660
    clock.now = 86400.0
    for _ in range(2):
        budget.begin()
        budget.end()
    with pytest.raises(RateLimited, match="2 requests a minute"):
        budget.begin()
    assert budget.running == 0, "a refused request does not run"


def test_new_limits_keep_what_was_used() -> None:
    clock = Clock(600.0)
    budget = Budget(key(concurrency=2, per_minute=5, tokens_per_day=100), clock, clock)
    budget.begin()
    budget.spend(90)
    budget.limit_by(key(concurrency=1, per_minute=5, tokens_per_day=95))
    assert budget.headers() == {
        "x-ratelimit-limit-requests": "5",
        "x-ratelimit-remaining-requests": "4",
        "x-ratelimit-reset-requests": "12s",
        "x-ratelimit-limit-tokens": "95",
        "x-ratelimit-remaining-tokens": "5",
        "x-ratelimit-reset-tokens": "85800s",
    }
    with pytest.raises(ConcurrencyExceeded):
        budget.begin()
    budget.limit_by(key())
    budget.begin()
    assert (budget.headers(), budget.running) == ({}, 2)


@pytest.mark.parametrize(
    ("fields", "spent"),
    [
        ({"outcome": "ok", "attempts": 1}, 7),
        ({"outcome": "cancelled", "attempts": 1}, 7),
        ({"outcome": "cancelled", "attempts": 0, "completion_tokens": 0}, 0),
        ({"outcome": "refused", "attempts": 1, "completion_tokens": 0}, 0),
        ({"outcome": "failed", "attempts": 2, "completion_tokens": 0}, 0),
        ({"outcome": "failed", "attempts": 2}, 7),
    ],
)
def test_what_counts(fields: dict[str, Any], spent: int) -> None:
    keys = Keys([key(tokens_per_day=100)])
    given: dict[str, Any] = {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7, "caller": "ann"}
    record = RequestRecord(**given | fields)
    keys.ended(record)
    keys.ended(RequestRecord(total_tokens=50, attempts=1, caller="someone else"))
    budget = keys.budget("ann")
    assert budget
    assert budget.headers()["x-ratelimit-remaining-tokens"] == str(100 - spent)


# Over HTTP


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Process, Process]]:
    with simulated_pair() as nodes:
        yield nodes


class Gateway:
    def __init__(self, client: httpx.AsyncClient, core: DisaggregatedInference, keys: dict[str, str]) -> None:
        self._client, self.core, self._keys = client, core, keys

    async def post(self, name: str, path: str, body: dict[str, Any]) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self._keys[name]}"}
        return await self._client.post(path, json={"model": MODEL, "stream": False} | body, headers=headers)

    async def metrics(self) -> str:
        headers = {"Authorization": f"Bearer {self._keys['free']}"}
        return (await self._client.get("/metrics", headers=headers)).text


@asynccontextmanager
async def gateway(pair: tuple[Process, Process], folder: Path, **limits: KeyLimits) -> AsyncIterator[Gateway]:
    file = folder / "keys.json"
    made = {name: new_key(name, file, **each) for name, each in ({"free": KeyLimits()} | limits).items()}
    async with DisaggregatedInference(load_config(simulated_config(*pair))) as core:
        transport = httpx.ASGITransport(gateway_app(core, Keys.load(file)))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=60) as client:
            yield Gateway(client, core, made)


def message_of(path: str, body: dict[str, Any]) -> str:
    """As the API's own errors have it."""
    if path.startswith("/api/"):
        assert set(body) == {"error"}
        return str(body["error"])
    if path == "/v1/messages":
        assert (body["type"], body["error"]["type"]) == ("error", "rate_limit_error")
    else:
        assert body["error"]["type"] == "rate_limit_error"
        assert body["error"]["code"] == "tokens_per_day_exceeded"
    return str(body["error"]["message"])


@pytest.mark.slow
def test_every_api_counts_tokens_and_refuses_in_its_own_words(pair: tuple[Process, Process], tmp_path: Path) -> None:
    limits: KeyLimits = {"tokens_per_day": 5}
    names = {path: path.replace("/", "-") for path in REQUESTS}

    async def run() -> None:
        async with gateway(pair, tmp_path, **dict.fromkeys(names.values(), limits)) as at:
            for path, body in REQUESTS.items():
                first = await at.post(names[path], path, body)
                assert first.status_code == 200, first.text
                assert first.headers["x-ratelimit-limit-tokens"] == "5"
                late = await at.post(names[path], path, body)
                assert late.status_code == 429, path
                assert "5 tokens a day" in message_of(path, late.json())
                assert int(late.headers["retry-after"]) >= 1
                assert late.headers["x-ratelimit-remaining-tokens"] == "0"
            assert (await at.post("free", "/v1/completions", REQUESTS["/v1/completions"])).status_code == 200
            text = await at.metrics()
            assert 'disagg_key_requests_total{key="-v1-messages",outcome="ok"} 1.0' in text
            assert 'disagg_key_tokens_total{key="-v1-messages",kind="completion"} 4.0' in text
            assert 'disagg_key_refused_total{key="-v1-messages",reason="tokens_per_day_exceeded"} 1.0' in text
            assert "x-ratelimit-limit-tokens" not in (await at.post("free", "/v1/completions", {})).headers
            assert all("caller" not in row for row in at.core.history.recent(10))

    asyncio.run(run())


def test_a_stream_holds_its_place_until_its_end(tmp_path: Path) -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        begun.set()
        yield b"one"
        await may_end.wait()
        yield b"two"

    async def stream(request: Request) -> Response:
        return StreamingResponse(pieces())

    async def run() -> None:
        file = tmp_path / "keys.json"
        secret = new_key("ann", file, concurrency=1)
        async with DisaggregatedInference(load_config(AWAY)) as core:
            app = gateway_app(core, Keys.load(file))
            app.router.routes.insert(0, Route("/v1/stream", stream, methods=["GET", "POST"]))
            client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")
            client.headers["Authorization"] = f"Bearer {secret}"
            async with client:
                first = asyncio.create_task(client.post("/v1/stream"))
                await begun.wait()
                busy = await client.post("/v1/stream")
                assert busy.status_code == 429
                assert busy.json()["error"]["code"] == "concurrency_exceeded"
                assert (await client.get("/v1/models")).status_code == 200, "looking is free"
                may_end.set()
                assert (await first).text == "onetwo"
                assert (await client.post("/v1/stream")).status_code == 200

    asyncio.run(run())


@pytest.mark.slow
def test_a_stream_is_counted(pair: tuple[Process, Process], tmp_path: Path) -> None:
    async def run() -> None:
        async with gateway(pair, tmp_path, ann={"tokens_per_minute": 10**9}) as at:
            done = await at.post("ann", "/v1/completions", {"prompt": "one two", "max_tokens": 50, "stream": True})
            assert done.status_code == 200
            after = await at.post("ann", "/v1/completions", {"prompt": "x", "max_tokens": 1})
            assert 10**9 - int(after.headers["x-ratelimit-remaining-tokens"]) >= 51, "prompts and completions"

    asyncio.run(run())


@pytest.mark.slow
def test_what_an_unfinished_stream_produced_counts(pair: tuple[Process, Process], tmp_path: Path) -> None:
    async def run() -> None:
        file = tmp_path / "keys.json"
        new_key("ann", file, tokens_per_day=10**6)
        keys = Keys.load(file)
        budget = keys.budget("ann")
        assert budget
        async with DisaggregatedInference(load_config(simulated_config(*pair))) as core:
            gateway_app(core, keys)
            options = {"prompt": "one two", "max_tokens": 4000, "ignore_eos": True, "caller": "ann"}
            stream = core.stream(**options)  # type: ignore[arg-type]
            async for delta in stream:
                if delta.token is not None:
                    break
            await stream.aclose()
            used = 10**6 - int(budget.headers()["x-ratelimit-remaining-tokens"])
            assert 0 < used < 4000

    asyncio.run(run())


def test_the_command_writes_every_limit(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from disaggregated_inference.cli.gateway import gateway_app as command

    limits = ["--concurrency", "3", "--per-minute", "60", "--tokens-per-minute", "1000", "--tokens-per-day", "20000"]
    file = tmp_path / "keys.json"
    result = CliRunner().invoke(command, ["key", "ann", "--file", str(file), "--group", "staff", *limits])
    assert result.exit_code == 0, result.output
    [entry] = json.loads(file.read_text())["keys"]
    del entry["key_hash"]
    expected = {"concurrency": 3, "per_minute": 60.0, "tokens_per_minute": 1000, "tokens_per_day": 20000}
    assert entry == {"name": "ann", "group": "staff"} | expected
    assert result.output.startswith("sk-disagg-")


def test_a_key_that_floods_delays_another_only_by_what_runs(tmp_path: Path) -> None:
    """Two places: a node with one slot, and one request that waits there."""
    ollama = RecordedOllama()
    front = Front(ollama.url, role="decode", slots=1)
    config: dict[str, Any] = {
        "decode_servers": [{"host": "127.0.0.1", "port": front.port, "model": "smollm2", "name": "d1"}]
    }

    async def run() -> None:
        file = tmp_path / "keys.json"
        keys = {name: new_key(name, file) for name in ("eve", "bob")}
        async with DisaggregatedInference(load_config(config)) as core:
            transport = httpx.ASGITransport(gateway_app(core, Keys.load(file)))
            async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=60) as client:

                def ask(name: str) -> asyncio.Task[httpx.Response]:
                    body = {"model": "smollm2", "prompt": f"{name} 1", "max_tokens": 2}
                    headers = {"Authorization": f"Bearer {keys[name]}"}
                    return asyncio.create_task(client.post("/v1/completions", json=body, headers=headers))

                assert (await ask("eve")).status_code == 200
                ollama.hold.clear()
                asked = [ask("eve") for _ in range(12)]
                assert await asyncio.to_thread(until, lambda: (core.queue.waiting, len(ollama.asked)) == (10, 3), 60)
                asked.append(ask("bob"))
                assert await asyncio.to_thread(until, lambda: core.queue.waiting == 11, 60)
                ollama.hold.set()
                assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200] * 13

    try:
        asyncio.run(run())
    finally:
        front.end()
        ollama.end()
    order = [body["prompt"].split()[0] for body in ollama.asked[1:]]
    assert order[:2] == ["eve", "eve"], "they run when bob comes"
    assert "bob" in order[2:4], "both places become free at nearly the same time"
