"""The orchestrator over real node processes: who serves, what a fault costs, and that no fault changes a token."""

import gc
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from disaggregated_inference.api import FALLBACK_WARNING
from disaggregated_inference.client import DisaggregatedClient
from disaggregated_inference.errors import ClusterError, DisaggError, NoDecodeNode
from disaggregated_inference.kv_transfer import format_address
from disaggregated_inference.timeouts import OrchestratorTimeouts
from tests.support.cluster import Process, config_of
from tests.support.engines import LoadTiny
from tests.support.handoff import alone, prompt_of
from tests.support.orchestrator_cluster import COMMON, Four, answered, ask_of
from tests.support.tcp_proxy import FaultyProxy
from tests.support.waiting import until

pytestmark = pytest.mark.slow

LONG = 2500


@pytest.fixture(scope="module")
def started(tiny_folder: Callable[[str], Path]) -> Iterator[Four]:
    four = Four(str(tiny_folder("llama")))
    yield four
    for node in four.all:
        node.end()


@pytest.fixture
def four(started: Four) -> Iterator[Four]:
    yield started.mended()
    for node in started.all:
        node.thaw()
    assert until(lambda: all(node.nothing_left() for node in started.all if node.alive), 40), [
        node.status() for node in started.all if node.alive
    ]


@pytest.fixture(scope="module")
def expect(tiny_engine: LoadTiny) -> Callable[[list[int], int], list[int]]:
    """Several tests ask for the longest completion."""
    longest: dict[tuple[int, ...], list[int]] = {}

    def tokens(prompt: list[int], count: int) -> list[int]:
        if len(longest.get(tuple(prompt), [])) < count:
            longest[tuple(prompt)] = alone(tiny_engine("mlx", "llama"), prompt, count)
        return longest[tuple(prompt)][:count]

    return tokens


@contextmanager
def client_of(four: Four, timeouts: OrchestratorTimeouts = OrchestratorTimeouts()) -> Iterator[DisaggregatedClient]:
    """That knows the nodes that are there: one that is not known yet takes nothing over."""
    with DisaggregatedClient(config_of(*four.all), timeouts) as client:
        there = sum(node.alive for node in four.all)
        assert until(lambda: sum(node["usable"] for node in client.status()["nodes"]) == there)
        yield client


def in_thread(work: Callable[[], Any]) -> "Future[Any]":
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def stalls(metrics: dict[str, Any], record_property: Any, what: str) -> None:
    """Report how long each failover took. The limit is generous: the machine may be busy."""
    for failover in metrics["failovers"]:
        record_property(
            "report",
            f"{what}: {failover['node']} {failover['code']}, noticed after {failover['detected_s']:.2f} s, "
            f"next token after {failover['stall_s'] or 0:.2f} s",
        )
        assert failover["detected_s"] < 30
        assert not failover["message"].startswith(failover["node"]), "every reader names the node beside it"


def test_a_disaggregated_request_and_its_metrics(four: Four, expect: Any) -> None:
    prompt = prompt_of(700)
    with client_of(four) as client:
        tokens, metrics = answered(client, prompt, 24)
        assert tokens == expect(prompt, 24)
        assert metrics["prompt_tokens_recomputed"] == 0
        assert metrics["method"] == "disaggregated_mlx"
        assert metrics["prefill_node"] in ("p1", "p2")
        assert metrics["decode_node"] in ("d1", "d2")
        assert (metrics["prompt_tokens"], metrics["completion_tokens"], metrics["total_tokens"]) == (700, 24, 724)
        assert metrics["warning"] is None
        numbers = ("prefill_time", "decode_time", "total_time", "prefill_speed", "decode_speed", "tokens_per_sec")
        assert all(isinstance(metrics[name], float) and metrics[name] > 0 for name in numbers)
        assert "->" in metrics["plan"]
        assert {"tokenize", "queue", "prefill", "decode"} <= {phase["name"] for phase in metrics["waterfall"]}
        ends_s = [phase["start_s"] + phase["seconds"] for phase in metrics["waterfall"]]
        assert max(ends_s) < metrics["total_time"] + 1e-6  # though the nodes had to meet first
        assert client.history(1)[0]["request_id"] == metrics["request_id"]
        assert client.health()["verdict"] == "all up"


def test_the_client_tokenizes_with_the_tokenizer_of_the_nodes(four: Four, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("DISAGG_HOME", str(tmp_path))
    with client_of(four) as client:
        response, metrics = client.generate(model="disaggregated:llama", prompt="hello there", max_tokens=4)
        assert isinstance(response, str)
        assert metrics["prompt_tokens"] == len("hello there")
        assert len(list((tmp_path / "tokenizers").glob("*.json"))) == 1
        assert "".join(client.generate(model="llama", prompt="hello", max_tokens=3, stream=True)) is not None


@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_a_node_that_is_dead_before_the_request(four: Four, expect: Any, leg: str, record_property: Any) -> None:
    prompt = prompt_of(600, seed=1)
    with client_of(four) as client:
        _, first = answered(client, prompt, 4)
        victim = four.named(first[f"{leg}_node"])
        victim.kill()
        tokens, metrics = answered(client, prompt, 16)
        assert not victim.alive
        assert tokens == expect(prompt, 16)
        assert metrics[f"{leg}_node"] != victim.name
        assert metrics["method"] == "disaggregated_mlx"
        stalls(metrics, record_property, f"{leg} dead before")


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_the_prefill_node_fails_during_prefill(four: Four, expect: Any, how: str, record_property: Any) -> None:
    prompt = prompt_of(LONG, seed=20 if how == "kill" else 21)  # one that no node holds
    # The decode node notices. It must not be taken for frozen itself because this machine is busy.
    with client_of(four, OrchestratorTimeouts(probe_s=3.0)) as client:
        answered(client, prompt_of(100), 2)
        answer = in_thread(lambda: answered(client, prompt, 16))
        victim = found(lambda: reading(four.p1, four.p2))
        getattr(victim, how)()
        tokens, metrics = answer.result(60)
        assert victim.name in failed(metrics)
        assert tokens == expect(prompt, 16)
        assert metrics["prompt_tokens_recomputed"] == 0
        stalls(metrics, record_property, f"prefill {how} while reading")


def found(look: Callable[[], Process | None]) -> Process:
    """Whom a look finds, as soon as it finds one."""
    seen: list[Process] = []

    def looked() -> bool:
        seen.extend(filter(None, [look()]))
        return bool(seen)

    assert until(looked)
    return seen[0]


def failed(metrics: Any) -> list[str]:
    """Whom an answer left. A machine that stands still for a second adds one that is well."""
    return [failover["node"] for failover in metrics["failovers"]]


def reading(*nodes: Process) -> Process | None:
    """The node that is in the middle of a prompt."""
    return next((node for node in nodes if 0 < node.status()["waiting_tokens"] < LONG), None)


def test_the_prefill_node_dies_during_the_kv_transfer(four: Four, expect: Any, record_property: Any) -> None:
    """A part of the cache has arrived; the decode node keeps what came whole."""
    prompt = prompt_of(LONG, seed=3)
    four.p2.kill()
    with FaultyProxy(
        ("127.0.0.1", four.p1.kv_port), "cut", at=800_000, pause_s=0.03
    ) as line:  # no faster than it is read
        four.p1.kv_addresses = [format_address(line.address)]
        with client_of(four) as client:
            answered(client, prompt_of(100), 2)
            answer = in_thread(lambda: answered(client, prompt, 16))
            assert line.struck.wait(20)
            four.p1.kill()
            tokens, metrics = answer.result(60)
    assert tokens == expect(prompt, 16)
    assert metrics["method"] == "fallback"
    assert metrics["warning"] == FALLBACK_WARNING
    assert 0 < metrics["prompt_tokens_recomputed"] < LONG - 300, "it went on where the transfer broke off"
    stalls(metrics, record_property, "prefill killed while sending")


@pytest.mark.parametrize(("how", "at"), [("kill", 1), ("kill", 10), ("freeze", 10)])
def test_the_decode_node_fails_during_generation(
    four: Four, expect: Any, how: str, at: int, record_property: Any
) -> None:
    prompt, count = prompt_of(500, seed=4), 1000
    with client_of(four) as client:
        answered(client, prompt_of(100), 2)
        tokens, metrics, victim = [], None, None
        for delta in client.stream(**ask_of(prompt, count)):
            if delta.token is not None:
                tokens.append(delta.token)
            metrics = delta.metrics or metrics
            if len(tokens) == at and victim is None:
                victim = found(lambda: writing(four.d1, four.d2))
                getattr(victim, how)()
        assert metrics
        assert victim
        assert victim.name in failed(metrics)
        assert metrics["decode_node"] != victim.name
        assert tokens == expect(prompt, count)
        stalls(metrics, record_property, f"decode {how} at token {at}")


def writing(*nodes: Process) -> Process | None:
    return next((node for node in nodes if node.alive and node.status()["waiting"]), None)


def test_the_decode_node_dies_with_the_last_token(four: Four, expect: Any) -> None:
    prompt = prompt_of(300, seed=5)
    with client_of(four) as client:
        tokens = []
        for delta in client.stream(**ask_of(prompt, 8)):
            if delta.token is not None:
                tokens.append(delta.token)
            if delta.finish_reason:
                four.d1.kill()
                four.d2.kill()
        assert tokens == expect(prompt, 8)


def test_the_decode_node_dies_during_the_kv_transfer(four: Four, expect: Any, record_property: Any) -> None:
    prompt = prompt_of(LONG, seed=6)
    lines = [FaultyProxy(("127.0.0.1", node.kv_port), pause_s=0.02) for node in (four.p1, four.p2)]
    for node, line in zip((four.p1, four.p2), lines, strict=True):
        node.kv_addresses = [format_address(line.address)]
    with client_of(four) as client:
        answer = in_thread(lambda: answered(client, prompt, 16))
        assert until(lambda: sum(line.passed for line in lines) > 600_000, 20)
        victim = next(node for node in (four.d1, four.d2) if node.status()["waiting"])
        victim.kill()
        for line in lines:
            line.pause_s = 0.0
        tokens, metrics = answer.result(60)
        assert victim.name in failed(metrics)
        assert tokens == expect(prompt, 16)
        stalls(metrics, record_property, "decode killed while the cache arrives")
    for line in lines:
        line.close()


def test_failover_continues_the_random_numbers_of_sampling(four: Four) -> None:
    prompt, count = prompt_of(400, seed=7), 1000
    rules = {"temperature": 0.9, "top_p": 0.95, "seed": 1234, "repetition_penalty": 1.1}
    with client_of(four) as client:
        undisturbed, _ = answered(client, prompt, count, **rules)
        tokens, victim = [], None
        for delta in client.stream(**ask_of(prompt, count, **rules)):
            if delta.token is not None:
                tokens.append(delta.token)
            if len(tokens) == 20 and victim is None:
                victim = found(lambda: writing(four.d1, four.d2))
                victim.kill()
        assert victim
        assert tokens == undisturbed


def test_failover_continues_every_choice(four: Four) -> None:
    prompt, count = prompt_of(300, seed=8), 400
    rules = {"temperature": 1.0, "seed": 5, "n": 3}
    with client_of(four) as client:
        _, undisturbed = client.generate(**ask_of(prompt, count, **rules))
        tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
        victim, metrics = None, None
        for delta in client.stream(**ask_of(prompt, count, **rules)):
            if delta.token is not None:
                tokens[delta.choice].append(delta.token)
            metrics = delta.metrics or metrics
            if len(tokens[0]) == 10 and victim is None:
                victim = found(lambda: writing(four.d1, four.d2))
                victim.kill()
        assert metrics
        assert metrics["failovers"]
        assert [tokens[at] for at in range(3)] == [choice["tokens"] for choice in undisturbed["choices"]]


def test_failover_keeps_the_output_format(four: Four) -> None:
    pattern = r"[a-z]{500,520}"
    rules = {"format": {"type": "regex", "pattern": pattern}, "temperature": 0.8, "seed": 3, "ignore_eos": False}
    prompt = prompt_of(200, seed=9)
    with client_of(four) as client:
        undisturbed, _ = client.generate(**ask_of(prompt, 700, **rules))
        text, victim = "", None
        for delta in client.stream(**ask_of(prompt, 700, **rules)):
            text += delta.text
            if len(text) > 20 and victim is None:
                victim = found(lambda: writing(four.d1, four.d2))
                victim.kill()
        assert victim
        assert text == undisturbed
        assert len(text) in range(500, 521)


def test_no_prefill_node_left(four: Four, expect: Any) -> None:
    prompt = prompt_of(500, seed=10)
    with client_of(four) as client:
        four.p1.kill()
        four.p2.kill()
        tokens, metrics = answered(client, prompt, 16)
        assert tokens == expect(prompt, 16)
        assert metrics["method"] == "fallback"
        assert metrics["warning"] == "Using fallback mode - slower performance"
        assert client.health()["verdict"] == "prefill down: decode-only"
        for node in (four.p1, four.p2):
            node.start()
            node.ready()
        assert until(lambda: answered(client, prompt, 4)[1]["method"] == "disaggregated_mlx", 20)


def test_no_decode_node_left(four: Four, expect: Any) -> None:
    prompt = prompt_of(500, seed=11)
    with client_of(four) as client:
        answered(client, prompt, 4)
        four.d1.kill()
        four.d2.kill()
        with pytest.raises(NoDecodeNode, match=r"^Decode server unavailable - request failed: d1: .*; d2: "):
            in_thread(lambda: answered(client, prompt, 16, timeout=2)).result(60)  # it waits as long as it has time
        assert client.health()["verdict"] == "decode down: cannot serve"
        for node in (four.d1, four.d2):
            node.start()
            node.ready()

        def back() -> bool:
            try:
                return answered(client, prompt, 16)[0] == expect(prompt, 16)
            except DisaggError:
                return False

        assert until(back, 20)


def test_nodes_of_one_role_share_the_work(four: Four, expect: Any) -> None:
    """Each decode node has memory for four answers, and tells nothing meanwhile: the router counts what it sent. Both
    prefill nodes read: the prompts take a while."""
    prompts, count = [prompt_of(800, seed=100 + number) for number in range(8)], 96
    memory = 4 * (800 + count + 16) * four.d1.status()["kv_token_bytes"]
    limits = "--kv-memory", str(memory), "--prefix-memory", "0"
    small = [Process(name, "decode", "mlx", four.d1.model, *COMMON, *limits) for name in ("d3", "d4")]
    try:
        for node in small:
            node.ready()
        with (
            DisaggregatedClient(config_of(four.p1, four.p2, *small, local="never", poll_s=60)) as client,
            ThreadPoolExecutor(8) as pool,
        ):
            assert until(lambda: client.health()["verdict"] == "all up")
            answers = list(pool.map(lambda prompt: answered(client, prompt, count), prompts))
        assert [tokens for tokens, _ in answers] == [expect(prompt, count) for prompt in prompts]
        writers, readers = ([metrics[leg] for _, metrics in answers] for leg in ("decode_server", "prefill_server"))
        assert sorted(Counter(writers).values()) == [4, 4], writers
        assert len(set(readers)) == 2, readers
    finally:
        for node in small:
            node.end()


def simulated(name: str, profile: str) -> Process:
    return Process(name, "decode", "simulated", "simulated:tiny", "--profile", profile)


def test_a_node_with_a_stuck_engine_is_replaced(record_property: Any) -> None:
    """It answers everything but the question: its engine has been at one thing for too long."""
    # Chunks of 0.8 s, the longest there are, and four times as fast as the other: chosen first, whatever a busy machine
    # measured at its start. The other has chunks of 16 tokens, the shortest there are: 0.27 s.
    stuck = simulated("stuck", "custom:prefill=240,decode=1000")
    well = simulated("well", "custom:prefill=60,decode=1000,chunk=8")
    try:
        for node in (stuck, well):
            node.ready()
        prompt = [number % 900 + 20 for number in range(250)]
        ask: dict[str, Any] = {"model": "simulated:tiny", "tokens": prompt, "max_tokens": 8, "temperature": 0}
        with DisaggregatedClient(config_of(stuck, well, local="always", stuck_s=0.55)) as client:
            assert client.health()["verdict"] == "all up"
            twice = [client.generate(**ask)[1] for _ in range(2)]
        # The reference comes last: a prefix cache that holds the prompt would make the router prefer its node.
        with DisaggregatedClient(config_of(well, local="always")) as client:
            _, expected = client.generate(**ask)
        assert all(metrics["tokens"] == expected["tokens"] for metrics in twice)
        failovers = [failover for metrics in twice for failover in metrics["failovers"]]
        assert [(failover["node"], failover["code"]) for failover in failovers] == [("stuck", "stuck")], twice
        stalls({"failovers": failovers}, record_property, "engine stuck")
    finally:
        for node in (stuck, well):
            node.end()


def test_a_dead_stream_of_a_healthy_node_fails_over(record_property: Any) -> None:
    """A tunnel forgot the connection: nothing refuses, the node answers everything else, and not one token comes."""
    s1, s2 = simulated("s1", "custom:prefill=5000,decode=60"), simulated("s2", "custom:prefill=5000,decode=25")
    ask: dict[str, Any] = {"model": "simulated:tiny", "prompt": "hello", "max_tokens": 60, "temperature": 0}
    with FaultyProxy(("127.0.0.1", s1.port)) as line:
        try:
            for node in (s1, s2):
                node.ready()
            with DisaggregatedClient(config_of(s1, local="always")) as client:
                _, expected = client.generate(**ask)
            config = config_of(s1, s2, local="always", poll_s=60)
            config["decode_servers"][0]["port"] = line.address[1]
            tokens: list[int] = []
            patient = OrchestratorTimeouts(probe_s=4.0)  # the node answers its probe, however busy the machine is
            with DisaggregatedClient(config, patient) as client:
                assert client.health()["verdict"] == "all up"
                for delta in client.stream(**ask):
                    tokens += [] if delta.token is None else [delta.token]
                    if len(tokens) == 20:
                        line.at, line.fault = line.passed + 300, "mute"
                    metrics = delta.metrics or {}
            assert line.struck.is_set()
            assert tokens == expected["tokens"]
            assert [(failover["node"], failover["code"]) for failover in metrics["failovers"]] == [
                ("s1", "stream_ended")
            ]
            stalls(metrics, record_property, "stream dead, node alive")
        finally:
            for node in (s1, s2):
                node.end()


def test_a_node_failure_counts_once_for_all_choices() -> None:
    """A node's death is one failure, however many choices were written there."""
    nodes = [simulated(name, "custom:prefill=5000,decode=60") for name in ("s1", "s2", "s3")]
    ask: dict[str, Any] = {"model": "simulated:tiny", "prompt": "hello", "max_tokens": 80, "temperature": 1, "seed": 5}
    ask |= {"n": 8}
    try:
        for node in nodes:
            node.ready()
        patient = OrchestratorTimeouts(probe_s=4.0)  # a node that is only slow is no third failure
        with DisaggregatedClient(config_of(*nodes, local="always"), patient) as client:
            _, expected = client.generate(**ask)
            came, kills = 0, [8 * 10, 8 * 30]
            for delta in client.stream(**ask):
                came += delta.token is not None
                if kills and came >= kills[0]:
                    kills.pop(0)
                    next(node for node in nodes if node.alive and node.status()["running"]).kill()
                metrics = delta.metrics or {}
        assert [choice["tokens"] for choice in metrics["choices"]] == [c["tokens"] for c in expected["choices"]]
        assert len({failover["node"] for failover in metrics["failovers"]}) == 2
    finally:
        for node in nodes:
            node.end()


def test_a_node_that_never_answers_delays_no_request() -> None:
    well = simulated("well", "instant").ready()
    with socket.create_server(("127.0.0.1", 0)) as hole:
        config = config_of(well, local="always", health_timeout_s=60.0)
        config["decode_servers"].append({"host": "127.0.0.1", "port": hole.getsockname()[1], "model": "simulated:tiny"})
        try:
            with DisaggregatedClient(config) as client:
                for _ in range(5):
                    client.generate(model="simulated:tiny", prompt="hello", max_tokens=4, timeout=30)
                assert client.status()["verdict"] == "a node is down, others serve"
        finally:
            well.end()


def test_failover_keeps_min_tokens_and_stop_strings(four: Four) -> None:
    """A stop string that came before min_tokens was no end; it is none when another node goes on."""
    prompt = prompt_of(250, seed=30)
    with client_of(four) as client:
        _, plain = answered(client, prompt, 60)
        text = client.generate(**ask_of(prompt, 60))[0]
        early = next(piece for piece in text[:12] if piece.isascii() and piece not in text[30:])
        rules = {"stop": early, "min_tokens": 40}
        undisturbed, _ = answered(client, prompt, 1000, **rules)
        tokens, victim = [], None
        for delta in client.stream(**ask_of(prompt, 1000, **rules)):
            if delta.token is not None:
                tokens.append(delta.token)
            if len(tokens) == 45 and victim is None:
                victim = found(lambda: writing(four.d1, four.d2))
                victim.kill()
        assert len(plain["tokens"]) == 60
        assert tokens == undisturbed


def test_a_recovered_node_serves_many_requests_at_once(four: Four, expect: Any) -> None:
    """The first request after a failure tries it out; the others wait for that, and not for its end."""
    prompt = prompt_of(200, seed=31)
    four.d2.kill()
    with client_of(four) as client:
        answered(client, prompt, 4)
        four.d1.kill()
        with pytest.raises(DisaggError):
            answered(client, prompt, 4, timeout=3)
        four.d1.start()
        four.d1.ready()
        assert until(lambda: client.status()["models"]["llama"] == "a node is down, others serve", 20)
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda _: answered(client, prompt, 200)[0], range(6)))
        assert answers == [expect(prompt, 200)] * 6


def test_a_node_restarted_between_two_polls(four: Four, expect: Any) -> None:
    """Between two looks at it: it says so itself, and is asked who it is before it is trusted again."""
    prompt = prompt_of(200, seed=33)
    with DisaggregatedClient(config_of(four.p1, four.d1, poll_s=600.0)) as client:
        answered(client, prompt, 4)
        for node in (four.d1, four.p1):
            node.kill()
            node.start()
            node.ready()
            tokens, metrics = answered(client, prompt, 16)
            assert tokens == expect(prompt, 16)
            assert [(failover["node"], failover["code"]) for failover in metrics["failovers"]] == [
                (node.name, "node_restarted")
            ]


def test_the_only_decode_node_may_freeze_for_a_while(four: Four, expect: Any) -> None:
    """A machine that swaps, say. No other node could go on: to give it up would be the end of the answer."""
    prompt = prompt_of(200, seed=34)
    with DisaggregatedClient(config_of(four.p1, four.d1)) as client:
        answered(client, prompt_of(100), 2)
        tokens, metrics = [], None
        for delta in client.stream(**ask_of(prompt, 300)):
            if delta.token is not None:
                tokens.append(delta.token)
            metrics = delta.metrics or metrics
            if len(tokens) == 10:
                four.d1.freeze()
                threading.Timer(1.5, four.d1.thaw).start()
    assert metrics
    assert metrics["failovers"] == []
    assert tokens == expect(prompt, 300)


def test_new_requests_while_the_only_decode_node_is_frozen(four: Four, expect: Any) -> None:
    """In a process that knows it, when it has been given up already; and in one that does not."""
    prompt = prompt_of(200, seed=35)
    config = config_of(four.p1, four.d1)
    with DisaggregatedClient(config) as client:
        answered(client, prompt, 4)
        four.d1.freeze()
        assert until(lambda: not client.status()["nodes"][1]["usable"])
        threading.Timer(0.5, four.d1.thaw).start()
        tokens, metrics = answered(client, prompt, 16)
        assert (tokens, metrics["failovers"]) == (expect(prompt, 16), [])
    four.d1.freeze()
    threading.Timer(1.1, four.d1.thaw).start()
    with DisaggregatedClient(config) as client:
        assert answered(client, prompt, 16)[0] == expect(prompt, 16)


def test_requests_wait_while_the_breaker_is_half_open() -> None:
    """A node that was started again reads a long prompt: whether it works is known with the first token."""
    impatient = OrchestratorTimeouts(no_node_s=0.5)
    node = Process("d", "decode", "simulated", "simulated:tiny", "--profile", "custom:prefill=500,decode=500")
    try:
        node.ready()
        with DisaggregatedClient(config_of(node, local="auto"), impatient) as client, ThreadPoolExecutor(3) as pool:
            answered(client, [1] * 8, 4, model="simulated")
            dying = in_thread(lambda: answered(client, [2] * 50, 2000, model="simulated", timeout=2))
            assert until(lambda: node.status()["running"])
            node.kill()
            with pytest.raises(NoDecodeNode):  # it waits as long as it has time
                dying.result(20)
            node.start()
            node.ready()
            assert until(lambda: client.status()["nodes"][0]["usable"])
            asked = [pool.submit(answered, client, [number + 3] * 600, 4, model="simulated") for number in range(3)]
            assert until(lambda: client.status()["nodes"][0]["state"] == "circuit half_open")
            assert client.status()["verdict"] == "all up"
            assert all(len(future.result(60)[0]) == 4 for future in asked)
    finally:
        node.end()


def test_a_bad_request_does_not_block_a_half_open_breaker(four: Four) -> None:
    prompt = prompt_of(100, seed=32)
    four.d2.kill()
    with client_of(four) as client:
        answered(client, prompt, 4)
        four.d1.freeze()
        with pytest.raises(DisaggError):
            answered(client, prompt, 4, timeout=4)
        four.d1.thaw()
        assert until(lambda: client.status()["nodes"][2]["usable"])
        with pytest.raises(DisaggError, match="stop"):
            answered(client, prompt, 4, stop="")
        answered(client, prompt, 4, timeout=30)


def test_no_fallback_when_the_config_forbids_it(four: Four) -> None:
    four.p1.kill()
    four.p2.kill()
    for local in ("never", "auto"):
        config = config_of(*four.all, fallback=False, local=local)
        with DisaggregatedClient(config) as client, pytest.raises(ClusterError, match="fall"):
            answered(client, prompt_of(100), 4)


def test_garbage_collected_clients_leave_no_thread(four: Four) -> None:
    def threads() -> int:
        return sum(thread.name == "disagg-client" for thread in threading.enumerate())

    before = threads()
    for _ in range(5):
        answered(DisaggregatedClient(config_of(*four.all)), prompt_of(50), 2)
    gc.collect()
    assert until(lambda: threads() <= before)
