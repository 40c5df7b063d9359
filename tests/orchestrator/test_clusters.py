"""Clusters as people have them: several models, the wrong model, many clients, and nodes that die all the time."""

import asyncio
import json
import random
import re
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from disaggregated_client import DisaggregatedClient
from disaggregated_inference.errors import (
    BadRequest,
    ClusterError,
    ContextTooLong,
    DeadlineExceeded,
    DisaggError,
    ModelNotFound,
    NoDecodeNode,
)
from disaggregated_inference.orchestrator import DisaggregatedInference
from disaggregated_inference.timeouts import OrchestratorTimeouts
from tests.support.cluster import Process, config_of
from tests.support.engines import LoadTiny
from tests.support.handoff import alone, prompt_of
from tests.support.orchestrator_cluster import COMMON, Four, answered, ask_of
from tests.support.scale import CHAOS_REQUESTS, CHAOS_SECONDS
from tests.support.waiting import until, until_async

pytestmark = pytest.mark.slow

Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def four(tiny_folder: Folder) -> Iterator[Four]:
    four = Four(str(tiny_folder("llama")))
    yield four
    for node in four.all:
        node.end()


def nothing_left(four: Four, seconds: float = 15) -> bool:
    return until(lambda: all(node.nothing_left() for node in four.all), seconds)


def test_two_models_on_four_nodes(tiny_folder: Folder, tiny_engine: LoadTiny) -> None:
    """As in the user's config: a prefill and a decode node for each model, both models at once from a thread pool."""
    kinds = {"qwen": "qwen3_moe", "gpt-oss": "gpt_oss"}
    nodes = {
        (model, role): Process(f"{model} {role}", role, engine, str(tiny_folder(kind)), *COMMON)
        for model, kind in kinds.items()
        for role, engine in (("prefill", "torch"), ("decode", "mlx"))
    }
    entries = {
        key: node.ready().entry | {"model": key[0], "comment": "as they write it"} for key, node in nodes.items()
    }
    config = {
        "prefill_servers": [entries[model, "prefill"] for model in kinds],
        "decode_servers": [entries[model, "decode"] for model in kinds],
        "policies": {"local": "never"},
    }
    try:
        with DisaggregatedClient(config) as client:
            asks = [
                ask_of(prompt_of(300, seed=number), 24) | {"model": name}
                for number, name in enumerate(["disaggregated:qwen3-coder:30b", "disaggregated:gpt-oss:120b"] * 3)
            ]
            with ThreadPoolExecutor(6) as pool:
                answers = list(pool.map(lambda ask: client.generate(**ask)[1], asks))
            merged = client.generate_many(asks)
            engines = [tiny_engine("mlx", kind) for kind in kinds.values()]
            for number, (answer, again) in enumerate(zip(answers, merged["results"], strict=True)):
                expected = alone(engines[number % 2], asks[number]["tokens"], 24)
                assert answer["tokens"] == again["tokens"] == expected
                assert answer["decode_node"] == f"{list(kinds)[number % 2]} decode"
                assert answer["method"] == "disaggregated_mlx"
            times = [result["sequential_time"] for result in merged["results"]]
            assert merged["speedup"] == pytest.approx(sum(times) / merged["wall_time"])
            assert merged["completion_tokens"] == 6 * 24
            assert merged["errors"] == 0
    finally:
        for node in nodes.values():
            node.end()


@pytest.mark.parametrize("what", ["model", "tokenizer", "rope"])
def test_a_node_with_another_model_gets_no_request(
    four: Four, tiny_folder: Folder, tiny_engine: LoadTiny, tmp_path: Path, what: str
) -> None:
    wrong = _copy_with_another(what, tiny_folder("llama"), tmp_path / "llama")
    imposter = Process("imposter", "decode", "mlx", str(wrong), *COMMON).ready()
    prompt = prompt_of(200)
    try:
        with DisaggregatedClient(config_of(imposter, *four.all)) as client:
            shown = client.health()["nodes"]["imposter"]
            assert shown["state"] == "mismatch"
            assert {"model": "weights", "tokenizer": "tokenizer", "rope": "rope"}[what] in shown["why"]
            answers = [answered(client, prompt, 8) for _ in range(8)]
            assert all(tokens == alone(tiny_engine("mlx", "llama"), prompt, 8) for tokens, _ in answers)
            assert imposter.status()["tokens_written"] == 0
    finally:
        imposter.end()


def test_a_node_with_another_model_never_takes_over(
    four: Four, tiny_folder: Folder, tiny_engine: LoadTiny, tmp_path: Path
) -> None:
    """Of one that holds something else not a token is taken: not when the right decode node is gone, and not in the
    middle of an answer."""
    wrong = _copy_with_another("model", tiny_folder("llama"), tmp_path / "llama")
    imposter = Process("imposter", "decode", "mlx", str(wrong), *COMMON)
    prompt, got = prompt_of(200), list[int | None]()
    expected = alone(tiny_engine("mlx", "llama"), prompt, 1500)
    try:
        with DisaggregatedClient(config_of(imposter.ready(), four.p1, four.d1, local="auto", poll_s=0.2)) as client:
            assert client.health()["nodes"]["imposter"]["state"] == "mismatch"

            def killed_at_40() -> None:
                for delta in client.stream(**ask_of(prompt, 1500, timeout=10)):
                    got.extend([] if delta.token is None else [delta.token])  # one delta says that it waits
                    if len(got) == 40:
                        four.d1.kill()

            with pytest.raises(NoDecodeNode):  # it waits for the right one as long as it has time
                killed_at_40()
            assert 40 <= len(got) < 1500
            assert got == expected[: len(got)]
            time.sleep(1.0)  # the client polls the imposter several times
            assert client.health()["nodes"]["imposter"]["state"] == "mismatch"
            with pytest.raises(NoDecodeNode):
                answered(client, prompt, 4, timeout=2)
            assert imposter.status()["tokens_written"] == 0
            four.d1.start()
            four.d1.ready()
            assert until(lambda: client.health()["verdict"] != "decode down: cannot serve", 20)
            assert answered(client, prompt, 8)[0] == expected[:8]
    finally:
        imposter.end()
        if not four.d1.alive:
            four.d1.start()
            four.d1.ready()


def _copy_with_another(what: str, original: Path, folder: Path) -> Path:
    from tests.support.tiny_models import save_tiny

    save_tiny("llama", folder, seed=99 if what == "model" else None)
    if what == "tokenizer":
        path = folder / "tokenizer.json"
        changed = json.loads(path.read_text())
        vocabulary = changed["model"]["vocab"]
        first, second = list(vocabulary)[:2]
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
        path.write_text(json.dumps(changed))
    if what == "rope":
        path = folder / "config.json"
        changed = json.loads(path.read_text())
        rope = changed.get("rope_parameters") or changed["rope_scaling"]
        rope["rope_theta"] = 10_000.0
        if "rope_theta" in changed:
            changed["rope_theta"] = 10_000.0
        path.write_text(json.dumps(changed))
    assert original != folder
    return folder


def test_one_client_for_32_threads(four: Four, tiny_engine: LoadTiny) -> None:
    prompts = [prompt_of(60 + number, seed=number) for number in range(64)]
    with DisaggregatedClient(config_of(*four.all)) as client, ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda prompt: answered(client, prompt, 12)[0], prompts))
    assert answers == [alone(tiny_engine("mlx", "llama"), prompt, 12) for prompt in prompts]
    assert nothing_left(four)


def test_cancelled_requests_leave_nothing_behind(four: Four, tiny_engine: LoadTiny) -> None:
    """Hundreds of clients leave; the requests between them are served as usual."""
    prompt = prompt_of(150)
    expected = alone(tiny_engine("mlx", "llama"), prompt, 6)
    chance = random.Random(7)

    async def leave(core: DisaggregatedInference, number: int) -> None:
        ask = ask_of(prompt_of(chance.choice([20, 200, 900]), seed=number), 200)
        task = asyncio.create_task(core.generate(**ask))
        await asyncio.sleep(chance.random() ** 2 * 0.3)
        task.cancel()
        await asyncio.wait({task})

    async def run() -> Counter[str]:
        async with DisaggregatedInference(config_of(*four.all)) as core:
            gate = asyncio.Semaphore(50)

            async def one(number: int) -> None:
                async with gate:
                    await leave(core, number)

            for first in range(0, CHAOS_REQUESTS, 100):
                await asyncio.gather(*(one(first + number) for number in range(100)))
                assert (await core.generate(**ask_of(prompt, 6)))["tokens"] == expected
            status = await core.status()
            assert not any(line["waiting"] or line["running"] for line in status["queue"].values())
            return Counter(status["served"])

    served = asyncio.run(run())
    assert served["cancelled"] > CHAOS_REQUESTS // 2
    assert served["failed"] == 0
    assert nothing_left(four)


def test_bad_requests_end_in_typed_errors_and_the_client_lives_on(four: Four) -> None:
    with DisaggregatedClient(config_of(*four.all)) as client:
        with pytest.raises(ModelNotFound, match="llama"):
            client.generate(model="no-such-model", prompt="x")
        with pytest.raises(BadRequest, match="exactly one"):
            client.generate(model="llama")
        with pytest.raises(BadRequest, match="no_such_option"):
            client.generate(model="llama", prompt="x", no_such_option=1)  # type: ignore[call-overload]
        with pytest.raises(DisaggError, match="temperature"):
            client.generate(model="llama", prompt="x", temperature=-1)
        with pytest.raises(DisaggError, match="4096"):
            client.generate(model="llama", prompt="x", max_tokens=5000)
        with pytest.raises(DisaggError, match="4096"):
            client.generate(model="llama", prompt="x" * 20_000)
        with pytest.raises(DeadlineExceeded):
            client.generate(**ask_of(prompt_of(1000), 3000, timeout=0.3))
        assert client.generate(model="llama", prompt="x", max_tokens=2)[1]["completion_tokens"] >= 1
        assert [record["ok"] for record in client.history(2)] == [True, False]
    with pytest.raises(ClusterError, match="closed"):
        client.generate(model="llama", prompt="x")
    assert nothing_left(four)


def test_closing_a_client_ends_all_its_requests(four: Four) -> None:
    """A call that came too late is told so, and none waits for a loop that is gone."""
    for way in ("health", "generate", "stream"):
        for _ in range(4):
            client = DisaggregatedClient(config_of(four.p1, four.d1))

            def keep_asking(client: DisaggregatedClient = client, way: str = way) -> str:
                while True:
                    try:
                        _asked(client, way)
                    except ClusterError as error:
                        return str(error)

            with ThreadPoolExecutor(8) as pool:
                said = [pool.submit(keep_asking) for _ in range(8)]
                time.sleep(random.random() * 0.1)
                client.close()
                assert all("clos" in each.result(10) or "shutting down" in each.result(10) for each in said)
    assert nothing_left(four)


def _asked(client: DisaggregatedClient, way: str) -> object:
    if way == "health":
        return client.health()
    ask = ask_of(prompt_of(20), 3)
    return client.generate(**ask) if way == "generate" else list(client.stream(**ask))


def test_a_client_is_refused_after_a_fork(four: Four) -> None:
    program = """
        import os, sys
        from disaggregated_client import DisaggregatedClient
        client = DisaggregatedClient({config})
        if not (child := os.fork()):
            try:
                client.generate(model="llama", prompt="x")
            except Exception as error:
                print(type(error).__name__, error, flush=True)
            client.close()
            print("closed", flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        print(client.generate(model="llama", prompt="x", max_tokens=2)[1]["completion_tokens"] > 0)
    """
    text = textwrap.dedent(program).format(config=config_of(four.p1, four.d1))
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", text], capture_output=True, text=True, timeout=60)
    refused = "ClusterError this client was made before a fork; make one in each process"
    assert ended.stdout.splitlines() == [refused, "closed", "True"], ended


def test_the_async_core_belongs_to_one_loop_and_is_closed_once(four: Four) -> None:
    core = DisaggregatedInference(config_of(four.p1, four.d1))

    async def running() -> bool:
        return any(queue["running"] for queue in (await core.status())["queue"].values())

    async def use() -> None:
        await core.generate(**ask_of(prompt_of(20), 3))
        task = asyncio.create_task(core.generate(**ask_of(prompt_of(20), 3000)))
        assert await until_async(running)
        closing = asyncio.create_task(core.aclose())
        await asyncio.sleep(0)
        for ask in (core.generate(**ask_of(prompt_of(20), 3)), core.health()):
            with pytest.raises(ClusterError, match="closed"):
                await ask
        await closing
        with pytest.raises(ClusterError, match="shutting down"):
            await task
        with pytest.raises(ClusterError, match="closed"):
            await core.generate(**ask_of(prompt_of(20), 3))
        assert len(asyncio.all_tasks()) == 1

    async def elsewhere(core: DisaggregatedInference) -> None:
        with pytest.raises(ClusterError, match="another event loop"):
            await core.generate(**ask_of(prompt_of(20), 3))

    asyncio.run(use())

    async def two_loops() -> None:
        async with DisaggregatedInference(config_of(four.p1, four.d1)) as core:
            await asyncio.to_thread(lambda: asyncio.run(elsewhere(core)))
            assert (await core.generate(**ask_of(prompt_of(20), 3)))["completion_tokens"] == 3

    asyncio.run(two_loops())


def test_the_context_window_of_the_config_is_enforced(four: Four) -> None:
    config = config_of(four.p1, four.d1) | {"models": {"llama": {"context_window": 100}}}
    with DisaggregatedClient(config) as client:
        for prompt, limit in ((150, 2), (50, 51), (100, None)):
            with pytest.raises(ContextTooLong):
                client.generate(model="llama", tokens=prompt_of(prompt), max_tokens=limit)
        _, metrics = client.generate(**ask_of(prompt_of(50), 50))
        assert metrics["completion_tokens"] == 50
        free: dict[str, Any] = {"model": "llama", "tokens": prompt_of(90), "ignore_eos": True}
        assert client.generate(**free)[1]["completion_tokens"] == 10  # as much as fits, where no limit was given


def test_the_interpreter_ends_with_requests_in_flight(four: Four) -> None:
    program = """
        import sys, threading
        from disaggregated_client import DisaggregatedClient
        client = DisaggregatedClient({config})
        stream = client.stream(model="llama", prompt="x" * 100, max_tokens=3000, ignore_eos=True)
        print(next(stream).token is not None)
        other = dict(model="llama", prompt="y", max_tokens=3000)
        threading.Thread(target=lambda: client.generate(**other), daemon=True).start()
        threading.Thread(target=lambda: list(client.stream(**other)), daemon=True).start()
        {end}
    """
    for end, code in (("", 0), ("sys.exit(3)", 3)):
        text = textwrap.dedent(program).format(config=config_of(*four.all), end=end)
        ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
        assert (ended.returncode, ended.stdout, complaints(ended.stderr)) == (code, "True\n", []), ended
    assert nothing_left(four)


def complaints(stderr: str) -> list[str]:
    """But for those about a node: on a busy machine one may stand still for a second."""
    return [line for line in stderr.splitlines() if not re.match(r"a leg failed: |\S+ is not usable: ", line)]


def test_daemon_threads_that_call_at_interpreter_exit(four: Four) -> None:
    program = """
        import atexit, threading, time
        from disaggregated_client import DisaggregatedClient
        ended, asked = threading.Event(), threading.Semaphore(0)
        def after_the_client():  # what is registered before it is called after its end
            ended.set()
            print(all(asked.acquire(timeout=10) for _ in range(2)))
            time.sleep(0.5)
        atexit.register(after_the_client)
        client = DisaggregatedClient({config})
        other = dict(model="llama", prompt="y", max_tokens=3)
        def ask(call):
            ended.wait()
            asked.release()
            call(**other)
        threading.Thread(target=ask, args=[client.generate], daemon=True).start()
        threading.Thread(target=ask, args=[lambda **other: list(client.stream(**other))], daemon=True).start()
    """
    text = textwrap.dedent(program).format(config=config_of(*four.all))
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, complaints(ended.stderr)) == (0, "True\n", []), ended


def test_nodes_that_die_all_the_time(four: Four, tiny_engine: LoadTiny, record_property: Any) -> None:
    """60 requests at once; every few seconds a node dies while another node of its role is up. A killed node is
    noticed at once. The probes have 10 s here, so that a node that is only slow on a busy machine is not given up."""
    patient = OrchestratorTimeouts(probe_s=10.0, max_probe_s=10.0)
    prompts = [prompt_of(40 + 13 * number, seed=number) for number in range(12)]
    expected = [alone(tiny_engine("mlx", "llama"), prompt, 24) for prompt in prompts]
    outcomes: Counter[str] = Counter()
    codes: Counter[str] = Counter()
    kills: list[str] = []
    errors: list[str] = []
    started, longest_s, over = time.monotonic(), 0.0, False

    async def client(core: DisaggregatedInference, number: int) -> None:
        nonlocal longest_s
        chance = random.Random(number)
        while not over:
            which, sent = chance.randrange(len(prompts)), time.monotonic()
            try:
                answer = await core.generate(**ask_of(prompts[which], 24))
                outcomes["right" if answer["tokens"] == expected[which] else "WRONG"] += 1
                outcomes["over a failure"] += bool(answer["failovers"])
                codes.update(f"{failover['node']} {failover['code']}" for failover in answer["failovers"])
            except DisaggError as error:
                outcomes["error"] += 1
                errors.append(f"{time.monotonic() - started:.1f} s: {error}")
            longest_s = max(longest_s, time.monotonic() - sent)

    async def killer(core: DisaggregatedInference) -> None:
        nonlocal over
        chance = random.Random(1)
        while time.monotonic() - started < CHAOS_SECONDS or len(kills) < 2:
            await asyncio.sleep(chance.uniform(1, 2))
            nodes = {node["name"]: node["usable"] for node in (await core.status())["nodes"]}
            pairs = [pair for pair in (("p1", "p2"), ("d1", "d2")) if all(nodes[name] for name in pair)]
            if pairs:
                victim = four.named(chance.choice(chance.choice(pairs)))
                await asyncio.to_thread(victim.kill)
                kills.append(victim.name)
                victim.start()
                await asyncio.to_thread(victim.ready)
        over = True

    async def run() -> None:
        async with DisaggregatedInference(config_of(*four.all), patient) as core:
            async with asyncio.timeout(CHAOS_SECONDS + 180):
                await asyncio.gather(killer(core), *(client(core, number) for number in range(60)))

    asyncio.run(run())
    total = outcomes["right"] + outcomes["error"] + outcomes["WRONG"]
    report = (
        f"{total} requests, kills {dict(Counter(kills))}: {dict(outcomes)}, {dict(codes)}, longest {longest_s:.1f} s"
    )
    record_property("report", report)
    assert outcomes["WRONG"] == 0, report
    assert outcomes["over a failure"] > 0, report
    assert outcomes["error"] <= total * 0.001, (report, errors[:5])
    assert nothing_left(four, 30), [node.status() for node in four.all]
