"""API keys: which models a key may use, how often, and that the key file has hashes only."""

import asyncio
import hashlib
import json
import stat
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from disaggregated_inference.cluster import load_config
from disaggregated_inference.errors import BadRequest, ConfigError, DisaggError, RateLimited, Unauthorized
from disaggregated_inference.gateway.app import gateway_app
from disaggregated_inference.gateway.auth import AuthMiddleware, Caller, Keys, require_keys
from disaggregated_inference.gateway.budgets import Bucket
from disaggregated_inference.gateway.cluster import routes as cluster
from disaggregated_inference.gateway.key_file import keys_of, new_key
from disaggregated_inference.gateway.ollama import routes as ollama
from disaggregated_inference.http import error_headers
from disaggregated_inference.orchestrator import DisaggregatedInference

CONFIG: Any = {
    "decode_servers": [
        {"host": "127.0.0.1", "port": 9, "model": "qwen3-coder", "name": "d1"},
        {"host": "127.0.0.1", "port": 10, "model": "gpt-oss", "name": "d2"},
    ],
    "models": {"qwen3-coder": {"aliases": ["coder"]}},
}

Ask = Callable[..., Awaitable[httpx.Response]]


def key_hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def describe(connection: HTTPConnection, error: Exception) -> Response:
    status = getattr(error, "status", 500)
    return JSONResponse({"path": connection.url.path, "error": str(error)}, status, error_headers(error, status))


def with_gateway(keys: Keys, ask: Callable[[Ask], Awaitable[None]]) -> None:
    """Runs `ask` with a client of an app with these keys. No node of its cluster runs."""

    async def who(request: Request) -> Response:
        caller = request.state.caller
        return JSONResponse({"name": caller.name, "models": list(caller.models)})

    async def run() -> None:
        async with DisaggregatedInference(load_config(CONFIG)) as core:
            guards = [Middleware(AuthMiddleware, keys=keys, describe=describe)]
            routes = [Route("/who", who, methods=["GET", "POST"]), *cluster.routes(), *ollama.routes()]
            handlers: Any = {DisaggError: lambda request, error: describe(request, error)}
            app = Starlette(routes=routes, middleware=guards, exception_handlers=handlers)
            app.state.core = core
            cluster.attach(app, keys)
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
                await ask(client.request)

    asyncio.run(run())


@pytest.fixture
def keys() -> Keys:
    entries = [
        {"name": "ann", "key_hash": "sha256:" + key_hash("ann's")},
        {"name": "bob", "key_hash": key_hash("bob's").upper(), "models": ["CODER", "gone"], "comment": "a guest"},
        {"name": "cy", "key_hash": key_hash("cy's"), "per_minute": 2},
    ]
    return Keys(keys_of(entries, "keys"))


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer ann's"},
        {"authorization": "bearer   ann's"},
        {"x-api-key": "ann's"},
        {"api-key": "ann's"},
        {"Authorization": "Basic dXNlcjpwYXNz", "X-Api-Key": "ann's"},
        {"Authorization": "Bearer of a proxy", "X-Api-Key": "ann's"},
    ],
)
def test_a_key_is_accepted_in_every_header(keys: Keys, headers: dict[str, str]) -> None:
    async def ask(client: Ask) -> None:
        answer = await client("GET", "/who", headers=headers)
        assert answer.json() == {"name": "ann", "models": []}

    with_gateway(keys, ask)


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer"}, {"Authorization": "Bearer no"}, {"Authorization": "ann's"}, {"x-api-key": ""}],
)
@pytest.mark.parametrize("path", ["/who", "/metrics", "/cluster", "/cluster/events", "/api/tags", "/no/such/path"])
def test_requests_without_a_key_are_refused(keys: Keys, path: str, headers: dict[str, str]) -> None:
    async def ask(client: Ask) -> None:
        answer = await client("GET", path, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["path"] == path

    with_gateway(keys, ask)


def test_health_paths_need_no_key(keys: Keys) -> None:
    async def ask(client: Ask) -> None:
        assert (await client("GET", "/health")).json() == {"status": "healthy", "role": "gateway"}
        assert (await client("HEAD", "/")).status_code == 200
        ready = await client("GET", "/ready")
        assert ready.status_code == 503
        assert ready.json() == {"status": "not ready", "verdict": "nothing is up"}
        guess = await client("GET", "/ready", headers={"x-api-key": "a guess"})
        assert guess.json() == ready.json()
        response = await client("GET", "/ready", headers={"x-api-key": "ann's"})
        assert set(response.json()["models"]) == {"qwen3-coder", "gpt-oss"}
        some = await client("GET", "/ready", headers={"x-api-key": "bob's"})
        assert set(some.json()["models"]) == {"qwen3-coder"}
        assert (await client("POST", "/")).status_code == 401

    with_gateway(keys, ask)


def test_a_key_with_invalid_bytes_is_refused(keys: Keys) -> None:
    async def ask(client: Ask) -> None:
        answer = await client("GET", "/who", headers=[(b"authorization", b"Bearer \xff\xfe\x00"[:-1])])
        assert answer.status_code == 401

    with_gateway(keys, ask)


def test_the_models_of_a_key_may_be_aliases(keys: Keys) -> None:
    async def ask(client: Ask) -> None:
        mine = {"headers": {"Authorization": "Bearer bob's"}}
        assert (await client("GET", "/who", **mine)).json()["models"] == ["qwen3-coder", "gone"]
        listed = (await client("GET", "/api/tags", **mine)).json()["models"]
        assert [model["name"] for model in listed] == ["qwen3-coder", "coder"]
        refused = await client("POST", "/api/show", json={"model": "gpt-oss"}, **mine)
        assert refused.status_code == 404
        assert (await client("POST", "/api/show", json={"model": "coder"}, **mine)).status_code == 200

    with_gateway(keys, ask)


@pytest.mark.parametrize("path", ["/cluster", "/cluster/events", "/metrics"])
def test_cluster_paths_refuse_a_key_with_limited_models(keys: Keys, path: str) -> None:
    async def ask(client: Ask) -> None:
        refused = await client("GET", path, headers={"x-api-key": "bob's"})
        assert refused.status_code == 403
        assert "gpt-oss" not in refused.text

    with_gateway(keys, ask)


def test_refusals_are_logged_with_the_name_of_the_key(keys: Keys, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> str:
        async with DisaggregatedInference(load_config(CONFIG)) as core:
            transport = httpx.ASGITransport(gateway_app(core, keys))
            async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
                refused = await client.post("/v1/messages", headers={"x-request-id": "mine", "x-api-key": "a guess"})
                assert refused.json()["request_id"] == "mine"
                assert (refused.headers["x-request-id"], refused.headers["request-id"]) == ("mine", "mine")
                for _ in range(3):
                    late = await client.post("/v1/chat/completions", json={}, headers={"x-api-key": "cy's"})
                assert (late.status_code, len(late.headers["x-request-id"])) == (429, 16)
                return (await client.get("/metrics", headers={"x-api-key": "ann's"})).text

    metrics = asyncio.run(run())
    for reason, count in {"unauthorized": 1, "rate_limited": 1, "bad_request": 2}.items():
        assert f'disagg_refused_total{{reason="{reason}"}} {count}.0' in metrics
    noted = {vars(record)["code"]: vars(record) for record in caplog.records if "code" in vars(record)}
    assert noted["unauthorized"]["request_id"] == "mine"
    assert noted["rate_limited"]["caller"] == "cy"
    assert not any(secret in str(noted) for secret in ("a guess", "cy's"))


def test_a_key_whose_models_are_gone_allows_no_model() -> None:
    config = load_config(CONFIG)
    caller = Caller(models=("qwen", "gpt"))  # parts of names are not enough
    assert not any(caller.among(config).may_use(name) for name in config.names)
    assert all(Caller().among(config).may_use(name) for name in config.names)
    assert Caller(models=("disaggregated:GPT-OSS",)).among(config).may_use("gpt-oss")


def test_requests_above_the_rate_limit_get_retry_after(keys: Keys) -> None:
    async def ask(client: Ask) -> None:
        mine = {"headers": {"x-api-key": "cy's"}}
        codes = [(await client("POST", "/who", **mine)).status_code for _ in range(3)]
        assert codes == [200, 200, 429]
        refused = await client("POST", "/who", **mine)
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert "cy" in refused.json()["error"]
        assert (await client("GET", "/who", **mine)).status_code == 200  # looking is free
        assert (await client("POST", "/who", headers={"x-api-key": "ann's"})).status_code == 200

    with_gateway(keys, ask)


def test_a_bucket_refills() -> None:
    now = 0.0
    bucket = Bucket(6, lambda: now)
    assert [bucket.take() for _ in range(6)] == [0.0] * 6
    assert bucket.take() == pytest.approx(10)
    now = 9.5
    assert bucket.take() == pytest.approx(0.5)
    now = 10.0
    assert bucket.take() == 0.0
    now = 1e6
    assert [bucket.take() == 0.0 for _ in range(7)] == [True] * 6 + [False]
    rare = Bucket(0.5, lambda: now)
    assert rare.take() == 0.0
    assert rare.take() == pytest.approx(120)


def test_without_keys_every_caller_is_allowed() -> None:
    async def ask(client: Ask) -> None:
        assert (await client("POST", "/who", headers={"x-api-key": "whatever"})).json()["name"] == "anyone"

    with_gateway(Keys(), ask)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "gateway.local"])
def test_without_keys_the_gateway_listens_on_loopback_only(host: str, keys: Keys) -> None:
    with pytest.raises(BadRequest, match="without keys"):
        require_keys(host, Keys(), insecure=False)
    require_keys(host, keys, insecure=False)
    require_keys(host, Keys(), insecure=True)
    for near in ("127.0.0.1", "::1", "localhost"):
        require_keys(near, Keys(), insecure=False)


def test_keys_that_are_made_at_once_are_all_in_the_file(tmp_path: Path) -> None:
    path, together = tmp_path / "keys.json", threading.Barrier(8)

    def make(number: int) -> None:
        together.wait()
        for part in range(5):
            new_key(f"key-{number}-{part}", path)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(make, range(8)))
    assert len(Keys.load(path)) == 40


def test_a_new_key_is_stored_as_its_hash(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    first = new_key("ann", path)
    path.chmod(0o644)  # as an earlier version or an editor left it
    second = new_key("bob", path, models=["coder"], per_minute=30)
    text = path.read_text()
    assert first not in text
    assert second not in text
    assert len(first) > 50
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]
    keys = Keys.load(path)
    assert keys.caller([first.encode()]).name == "ann"
    owner = hashlib.sha256(second.encode()).hexdigest()
    assert keys.caller([second.encode()]) == Caller(name="bob", models=("coder",), owner=owner)
    assert json.loads(text)["keys"][1]["per_minute"] == 30
    with pytest.raises(Unauthorized):
        keys.caller([b"sk-disagg-other"])
    with pytest.raises(ConfigError, match="same name"):
        new_key("ann", path)
    with pytest.raises(BadRequest, match="json"):
        new_key("ann", tmp_path / "keys.toml")
    assert path.read_text() == text


def test_keys_in_toml(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[[keys]]\nname = "ann"\nkey_hash = "{key_hash("k")}"\nper_minute = 5\n')
    budget = Keys.load(path).budget("ann")
    assert budget
    assert budget.headers()["x-ratelimit-limit-requests"] == "5"
    assert len(Keys.load(None)) == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"keys": []}, "no keys"),
        ({"keyz": []}, "expected"),
        ("text", "expected"),
        ({"keys": [{"name": "a"}]}, "key_hash"),
        ({"keys": [{"name": "a", "key": "secret"}]}, "never keys"),
        ({"keys": [{"name": "a", "key_hash": "abc"}]}, "key_hash"),
        ({"keys": [{"name": "", "key_hash": key_hash("a")}]}, "name"),
        ({"keys": [{"name": "a", "key_hash": key_hash("a"), "modles": ["x"]}]}, "modles"),
        ({"keys": [{"name": "a", "key_hash": key_hash("a"), "models": []}]}, "models"),
        ({"keys": [{"name": "a", "key_hash": key_hash("a"), "per_minute": 0}]}, "per_minute"),
        ({"keys": [{"name": "a", "key_hash": key_hash("a"), "concurrency": 0}]}, "concurrency"),
        ({"keys": [{"name": "a", "key_hash": key_hash("a"), "concurrency": 1.5}]}, "concurrency"),
        ({"keys": [{"name": "a", "key_hash": key_hash("a"), "tokens_per_minute": -1}]}, "tokens_per_minute"),
        ({"keys": [{"name": "a", "key_hash": key_hash("a"), "tokens_per_day": "1M"}]}, "tokens_per_day"),
        ({"keys": [{"name": "a", "key_hash": key_hash("a"), "tokens_per_week": 1}]}, "tokens_per_week"),
        ({"keys": [{"name": "a", "key_hash": key_hash("a"), "group": ""}]}, "group"),
        ({"keys": [{"name": each, "key_hash": key_hash("a")} for each in "ab"]}, "same key_hash"),
        ({"keys": [{"name": "a", "key_hash": key_hash(each)} for each in "ab"]}, "same name"),
    ],
)
def test_invalid_key_files_are_refused(tmp_path: Path, content: Any, words: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=words) as caught:
        Keys.load(path)
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError, match="no such file"):
        Keys.load(tmp_path / "none.json")


def begin(keys: Keys, caller: Caller) -> None:
    budget = keys.budget(caller.name)
    assert budget
    budget.begin()


def test_a_reload_keeps_the_buckets(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    slow, gone = new_key("slow", path, per_minute=1), new_key("gone", path)
    keys = Keys.load(path)
    caller = keys.caller([slow.encode()])
    begin(keys, caller)
    kept = [entry for entry in json.loads(path.read_text())["keys"] if entry["name"] == "slow"]
    path.write_text(json.dumps({"keys": kept}))
    keys.reload(path)
    with pytest.raises(RateLimited):
        begin(keys, caller)
    with pytest.raises(Unauthorized):
        keys.caller([gone.encode()])
    path.write_text("{")
    with pytest.raises(ConfigError):
        keys.reload(path)
    assert keys.caller([slow.encode()]) == caller
