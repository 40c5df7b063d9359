"""`cached_tokens` never tells of another key's text: the attack of issue 18 on real nodes, and what it finds."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from disaggregated_inference.cluster import load_config
from disaggregated_inference.gateway.app import gateway_app
from disaggregated_inference.gateway.auth import Caller, Keys
from disaggregated_inference.gateway.key_file import KeyLimits, new_key
from disaggregated_inference.orchestrator import DisaggregatedInference
from tests.support.cluster import Process, config_of
from tests.support.gateway import gateway_process
from tests.support.waiting import until

SECRET = "482913"
KNOWN = "Dear bank, the number of my card is "
COMMON = ("--dtype", "float32", "--kv-memory", "64M")
Nodes = tuple[Process, Process, Process]

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def nodes(tiny_folder: Callable[[str], Path]) -> Iterator[Nodes]:
    """A byte is a token."""
    model = str(tiny_folder("llama"))
    reader = Process("p1", "prefill", "torch", model, *COMMON)
    writers = [Process(name, "decode", "mlx", model, *COMMON) for name in ("d1", "d2")]
    try:
        yield reader.ready(), writers[0].ready(), writers[1].ready()
    finally:
        for node in (reader, *writers):
            node.end()


class Api:
    """A gateway as the holder of one key sees it."""

    def __init__(self, client: httpx.Client, key: str) -> None:
        self.requests = 0
        self._client, self._headers = client, {"Authorization": f"Bearer {key}"}

    def cached_tokens(self, prompt: str) -> int:
        self.requests += 1
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
        answer = self._client.post("/v1/completions", json=body, headers=self._headers)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def recovered(attacker: Api) -> str:
    """A guess of the next digit that is right has one token more in the cache."""
    digits = ""
    while len(digits) < len(SECRET):
        known = KNOWN + digits
        right = (digit for digit in "0123456789" if attacker.cached_tokens(f"{known}{digit}?") > len(known))
        if (digit := next(right, None)) is None:
            break
        digits += digit
    return digits


def attack(nodes: Nodes, folder: Path, victim: str, attacker: str, **policies: Any) -> tuple[str, int]:
    """What the attacker recovers, and its number of requests. The victim's text is cached before."""
    file = folder / "keys.json"
    groups = {"ann": "staff", "bob": "staff", "eve": None}
    keys = {name: new_key(name, file, group=group) for name, group in groups.items()}
    with (
        gateway_process(folder, config_of(*nodes[:2], **policies), "--keys", str(file)) as gateway,
        httpx.Client(base_url=gateway.url, timeout=120) as client,
    ):
        apis = {name: Api(client, key) for name, key in keys.items()}
        before = nodes[0].status()["prefixes"]["blocks"]
        apis[victim].cached_tokens(f"{KNOWN}{SECRET}. Yours, {folder.name}")
        assert until(lambda: nodes[0].status()["prefixes"]["blocks"] > before)
        return recovered(apis[attacker]), apis[attacker].requests


@slow
def test_six_digits_are_recovered_where_all_keys_share_prefixes(nodes: Nodes, tmp_path: Path) -> None:
    digits, requests = attack(nodes, tmp_path, "ann", "eve", prefix_sharing="shared")
    assert digits == SECRET
    assert requests <= 60


@slow
def test_nothing_is_recovered_by_default(nodes: Nodes, tmp_path: Path) -> None:
    assert attack(nodes, tmp_path, "ann", "eve") == ("", 10)


@slow
def test_groups_share_with_themselves_only(nodes: Nodes, tmp_path: Path) -> None:
    for name in ("outside", "inside"):
        (tmp_path / name).mkdir()
    assert attack(nodes, tmp_path / "outside", "ann", "eve", prefix_sharing="group") == ("", 10)
    assert attack(nodes, tmp_path / "inside", "ann", "bob", prefix_sharing="group")[0] == SECRET


@asynccontextmanager
async def in_process(nodes: Nodes, folder: Path, **config: Any) -> AsyncIterator[Callable[..., Any]]:
    """Posts to a gateway in this process, with the keys of ann and bob."""
    file, none = folder / "keys.json", KeyLimits()
    keys = {name: new_key(name, file, **none) for name in ("ann", "bob")}
    async with DisaggregatedInference(load_config(config_of(*nodes[:2]) | config)) as core:
        transport = httpx.ASGITransport(gateway_app(core, Keys.load(file)))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=120) as client:

            async def post(name: str, path: str, **body: Any) -> Any:
                headers = {"x-api-key": keys[name]}
                answer = await client.post(path, json={"model": "llama", "stream": False} | body, headers=headers)
                assert answer.status_code == 200, answer.text
                return answer.json()

            yield post


@slow
def test_the_prefill_node_computes_what_another_key_has_sent(nodes: Nodes, tmp_path: Path) -> None:
    """And the transfer leaves out nothing."""
    prompt = "The same words of two people, who do not know of each other. " * 3

    async def run() -> None:
        async with in_process(nodes, tmp_path) as post:

            async def computed(name: str, **more: Any) -> tuple[int, Any]:
                before = nodes[0].status()["prompt_tokens_computed"]
                body = {"prompt": prompt, "max_tokens": 1, "include_metrics": True} | more
                metrics = (await post(name, "/v1/completions", **body))["disagg"]
                return nodes[0].status()["prompt_tokens_computed"] - before, metrics

            await computed("ann")  # with the canary of the nodes' first meeting, perhaps
            tokens, metrics = await computed("bob")
            assert (tokens, metrics["cached_tokens"]) == (len(prompt), 0)
            all_bytes = metrics["kv_bytes"]
            assert until(lambda: nodes[0].nothing_left())
            tokens, metrics = await computed("bob")
            assert tokens < 64
            assert metrics["kv_bytes"] < all_bytes
            tokens, metrics = await computed("bob", cache_salt="a project of bob's")
            assert (tokens, metrics["cached_tokens"]) == (len(prompt), 0), "a salt separates further"
            assert metrics["kv_bytes"] == all_bytes

    asyncio.run(run())


@slow
@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        ("/v1/completions", {"prompt": "{}", "max_tokens": 1}, lambda a: a["usage"]["prompt_tokens_details"]),
        ("/v1/responses", {"input": "{}", "max_output_tokens": 1}, lambda a: a["usage"]["input_tokens_details"]),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "{}"}], "max_tokens": 1},
            lambda a: a["usage"]["prompt_tokens_details"],
        ),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "{}"}], "max_tokens": 1},
            lambda a: {"cached_tokens": a["usage"]["cache_read_input_tokens"]},
        ),
    ],
)
def test_every_api_keeps_keys_and_salts_apart(
    nodes: Nodes, tmp_path: Path, path: str, body: dict[str, Any], count: Callable[[Any], dict[str, int]]
) -> None:
    filled = json.loads(json.dumps(body).replace("{}", f"Words of one person for {path}. " * 4))

    async def run() -> None:
        async with in_process(nodes, tmp_path) as post:

            async def cached(name: str, **more: Any) -> int:
                return count(await post(name, path, **filled, **more))["cached_tokens"]

            assert await cached("ann") == 0
            assert await cached("bob") == 0
            assert await cached("ann", cache_salt="mine") == 0
            assert await cached("bob", cache_salt="mine") == 0
            for name in ("ann", "bob"):
                assert await cached(name) > 100
                assert await cached(name, cache_salt="mine") > 100

    asyncio.run(run())


@slow
def test_a_request_that_fails_over_keeps_its_salt(nodes: Nodes) -> None:
    """The other decode node, and the prefill node that read prompt and written tokens, have them under the salt."""
    prompt = "A long story of one person, which only this person may know. " * 3
    request = {"prompt": prompt, "temperature": 0, "ignore_eos": True}

    async def run() -> tuple[str, dict[str, Any]]:
        async with DisaggregatedInference(load_config(config_of(*nodes))) as core:
            text, killed = "", False
            metrics: dict[str, Any] = {}
            async for delta in core.stream(max_tokens=400, cache_salt="ann", **request):  # type: ignore[arg-type]
                text += delta.text or ""
                metrics = delta.metrics or metrics
                if not killed and delta.token is not None:
                    killed = True
                    next(node for node in nodes[1:] if node.status()["slots"]["used"]).kill()
            return text, metrics

    async def cached(core: DisaggregatedInference, text: str, salt: str | None) -> int:
        answer = await core.generate(**request | {"prompt": text}, max_tokens=1, cache_salt=salt)  # type: ignore[arg-type]
        return int(answer["cached_tokens"])

    async def look(text: str) -> list[int]:
        alive = [node for node in nodes if node.alive]
        async with DisaggregatedInference(load_config(config_of(*alive))) as core:
            return [await cached(core, f"{prompt}{text}?", salt) for salt in (None, "bob", "ann")]

    try:
        text, metrics = asyncio.run(run())
        assert len(metrics["failovers"]) >= 1, "the decode node was killed"
        assert metrics["completion_tokens"] == 400
        others, bobs, own = asyncio.run(look(text[:50]))
        assert (others, bobs) == (0, 0)
        assert own >= len(prompt)
    finally:
        for node in nodes:
            if not node.alive:
                node.start()
                node.ready()


@slow
def test_a_named_prompt_is_shared_and_nothing_after_it(nodes: Nodes, tmp_path: Path) -> None:
    """Keys share whole blocks of 64 tokens of the system prompt that the cluster file names."""
    system = "You are the assistant of a bank, and tell no caller the number of a card. " * 3

    def body(text: str, user: str) -> dict[str, Any]:
        messages = [{"role": "system", "content": text}, {"role": "user", "content": user}]
        return {"messages": messages, "max_tokens": 1, "temperature": 0}

    async def run() -> None:
        shared = {"llama": {"shared_prompts": [system]}}
        async with in_process(nodes, tmp_path, models=shared) as post:

            async def cached(name: str, text: str, user: str) -> int:
                answer = await post(name, "/v1/chat/completions", **body(text, user))
                return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

            secret = KNOWN + SECRET * 30
            assert await cached("ann", system, secret) < 64
            assert until(lambda: nodes[0].nothing_left())
            known = await cached("bob", system, secret)
            assert len(system) - 64 < known <= len(system) + 32, "of the system prompt, whole blocks"
            assert known % 64 == 0
            for guess in (SECRET, SECRET[:1], "7"):
                assert await cached("bob", system, f"{KNOWN}{guess}?") <= len(system) + 32 + len(KNOWN)
            own = "Another text, which is private to its caller. " * 5
            assert await cached("ann", own, "Hi") < 64
            assert await cached("bob", own, "Hi") < 64, "a prompt that is not named is not shared"

    asyncio.run(run())


# The salt of a caller


def test_salts_name_no_caller_and_a_wish_never_joins() -> None:
    ann, bob = Caller(name="ann", owner="aa", group="staff"), Caller(name="bob", owner="bb", group="staff")
    eve, anyone = Caller(name="eve", owner="ee"), Caller()
    assert anyone.cache_salt("key") is None, "without keys, all share one cache"
    assert all(caller.cache_salt("shared") is None for caller in (ann, bob, eve))
    assert ann.cache_salt("group") == bob.cache_salt("group")
    assert eve.cache_salt("group") == eve.cache_salt("key"), "a key without a group is alone"
    callers = (ann, bob, eve, anyone)
    salts = [caller.cache_salt("key", wish) for caller in callers for wish in (None, "x", ann.cache_salt("key"))]
    assert len(set(salts)) == len(salts), "no salt of a client is that of another caller"
    named_like = Caller(name="x", owner="staff")
    assert named_like.cache_salt("key") != ann.cache_salt("group")
    assert "aa" not in str(ann.cache_salt("key"))[:3]
