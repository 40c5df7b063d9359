"""An engine computes with its node's share of the cores, which changes when nodes start and end."""

import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from disaggregated_inference.client import DisaggregatedClient
from disaggregated_inference.cores import CoreShare, available_cores
from disaggregated_inference.engines import load_engine
from disaggregated_inference.models import ModelFiles, ModelStore
from disaggregated_inference.node.engine_threads import EngineThreads
from disaggregated_inference.node.node import Node
from disaggregated_inference.node.rate_measurement import rescale_rates
from disaggregated_inference.node.scheduler import Scheduler, Work
from disaggregated_inference.timeouts import NodeTimeouts
from tests.support.command import read_output
from tests.support.engines import ENGINE_OPTIONS, LLAMACPP, LoadTiny
from tests.support.handoff import alone, prompt_of
from tests.support.node_pair import Pair
from tests.support.node_process import Node as NodeProcess
from tests.support.orchestrator_cluster import ask_of
from tests.support.waiting import until

_AT_ONCE = NodeTimeouts(look_for_nodes_s=0.0)


@pytest.fixture(autouse=True)
def unchanged_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "KMP_BLOCKTIME"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


def share(folder: Path, fixed: int = 0) -> CoreShare:
    return CoreShare(fixed, folder / "nodes", 4)


@pytest.mark.parametrize("name", [*ENGINE_OPTIONS, *LLAMACPP])
def test_the_number_of_threads_changes_while_the_engine_runs(name: str, tiny_engine: LoadTiny) -> None:
    engine = tiny_engine(name, "llama")
    expected = alone(engine, prompt_of(70), 8)
    try:
        for count in (2, 1):
            engine.set_threads(count)
            assert engine.threads == count
            assert alone(engine, prompt_of(70), 8) == expected
    finally:
        engine.set_threads(1)


def test_the_engine_follows_other_nodes(tmp_path: Path, tiny_engine: LoadTiny) -> None:
    threads = EngineThreads(share=share(tmp_path), timeouts=_AT_ONCE)
    engine = tiny_engine("torch", "llama")

    def load() -> Any:
        threads.apply(engine)
        return engine

    scheduler, other = Scheduler(load), share(tmp_path)
    told: list[tuple[int, int]] = []
    threads.on_change = lambda before, now: told.append((before, now))

    def follows(count: int) -> bool:
        threads.follow(scheduler)
        return engine.threads == count

    try:
        assert engine.threads == 4
        other.join()
        assert until(lambda: follows(2))
        computing = scheduler.submit(_until_released(release := threading.Event()))
        for _ in range(3):
            threads.follow(scheduler)
        assert not told, "what was measured is compared when the engine has nothing else to do"
        release.set()
        computing.result()
        assert until(lambda: follows(2) and told == [(4, 2)])
        other.leave()
        assert until(lambda: follows(4) and told == [(4, 2), (2, 4)])
        assert not until(lambda: follows(4) and len(told) > 2, 0.2), "once for a change"
    finally:
        scheduler.call(lambda: engine.set_threads(1))
        scheduler.stop()
    other.join()
    threads.follow(scheduler)  # a stopped scheduler is left alone


def _until_released(release: threading.Event) -> Work[None]:
    while not release.is_set():
        yield


@pytest.mark.parametrize(
    ("threads_before", "threads", "known_tokens_per_s", "expected"),
    [
        pytest.param(2, 1, 1e12, 0.5e12, id="half, at most"),
        pytest.param(2, 1, 1e-6, 1e-6, id="fewer threads are never faster"),
        pytest.param(1, 4, 1e-6, 4e-6, id="four times, at most"),
        pytest.param(1, 4, 1e12, 1e12, id="more threads are never slower"),
    ],
)
def test_rates_of_another_number_of_threads_are_corrected(
    threads_before: int,
    threads: int,
    known_tokens_per_s: float,
    expected: float,
    nodes: Callable[..., Pair],
    tiny_folder: Callable[[str], Path],
) -> None:
    """A node that was alone when it measured itself. How much it changes is measured; the ratio is the limit."""
    _, decode = nodes()
    served = Node(ModelFiles("llama", tiny_folder("llama")), decode.kv_memory, decode=decode)
    meters = decode.kv_source.prefill_rates, decode.kv_memory.scheduler.batch.rates
    for meter, size in zip(meters, (64, 1), strict=True):
        meter.record(size, size, size / known_tokens_per_s)
    decode.kv_memory.scheduler.call(lambda: rescale_rates(served, threads_before, threads))
    for meter in meters:
        assert [rate.tokens_per_s for rate in meter.stats()] == [pytest.approx(expected)]
    counters = decode.kv_memory.engine.counters
    assert (counters.prompt_tokens, counters.step_tokens) == (0, 0), "no request computed these"


def test_an_engine_without_cpu_threads_leaves_the_cores_to_others(tmp_path: Path) -> None:
    threads, other = EngineThreads(share=share(tmp_path)), share(tmp_path)
    other.join()
    assert other.threads == 2
    engine = load_engine("simulated", ModelStore().resolve("simulated:tiny"))
    threads.apply(engine)
    assert (engine.threads, other.threads) == (0, 4)


def test_what_the_libraries_find_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    EngineThreads(share=share(tmp_path))
    assert (os.environ["OMP_NUM_THREADS"], os.environ["OMP_WAIT_POLICY"]) == ("4", "passive")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    EngineThreads(share=share(tmp_path))
    assert os.environ["OMP_NUM_THREADS"] == "3", "the user's number stays"
    EngineThreads(2, share(tmp_path, 2))
    assert os.environ["OMP_NUM_THREADS"] == "2", "--threads comes first"


@contextmanager
def two_nodes(model: str, folder: Path, *arguments: str) -> Iterator[tuple[NodeProcess, NodeProcess]]:
    """As a user starts them, in a machine of their own."""
    folder.mkdir()
    environment = {"TMPDIR": str(folder), "OMP_NUM_THREADS": "", "OMP_WAIT_POLICY": "", "OMP_DISPLAY_ENV": "TRUE"}
    shared = ("--model", model, "--prefix-memory", "0", *arguments)
    with ExitStack() as stack:
        nodes = []
        for role in ("prefill", "decode"):
            nodes.append(NodeProcess(role, *shared, forked=False, **environment))
            stack.callback(nodes[-1].stop)
        yield nodes[0], nodes[1]


def _handed_over_s(prefill: NodeProcess, decode: NodeProcess, length: int) -> float:
    started = time.perf_counter()
    _, read = prefill.ask("/prefill", {"tokens": prompt_of(length), "wait": False})
    _, answer = decode.ask("/decode", {"context": read["context"], "max_new_tokens": 32})
    assert len(answer["tokens"]) == 32
    return time.perf_counter() - started


@contextmanager
def client_of(pair: tuple[NodeProcess, NodeProcess]) -> Iterator[DisaggregatedClient]:
    servers = [{"host": "127.0.0.1", "port": node.ready["port"], "model": "llama"} for node in pair]
    config = {"prefill_servers": servers[:1], "decode_servers": servers[1:], "policies": {"local": "never"}}
    with DisaggregatedClient(config) as client:
        assert until(lambda: client.health()["verdict"] == "all up", 60)
        yield client


def _four_at_once_s(client: DisaggregatedClient) -> float:
    started = time.perf_counter()
    client.generate_many([ask_of(prompt_of(200, seed=number), 60) for number in range(4)])
    return time.perf_counter() - started


def _measured_by_predicted(client: DisaggregatedClient) -> tuple[float, float]:
    """Of the first token and of the end; the median of some requests, in which reading the prompt is most of the work.
    Predictions rest on what the nodes have measured: some requests of that length first."""
    for number in range(3):
        client.generate(**ask_of(prompt_of(2000, seed=100 + number), 2))
    assert until(lambda: _has_measured(client, 3), 60)
    found = [client.generate(**ask_of(prompt_of(2000, seed=number), 2))[1] for number in range(5)]
    first, total = ("first_token_time", "predicted_first_token_time"), ("total_time", "predicted_total_time")
    ratios = [statistics.median(each[real] / each[predicted] for each in found) for real, predicted in (first, total)]
    return ratios[0], ratios[1]


def _has_measured(client: DisaggregatedClient, samples: int) -> bool:
    """The orchestrator knows it, by its last poll."""
    prefill, decode = client.status()["nodes"]
    rates = [rate for rate in prefill["rates"]["prefill"] if rate["size"] == 1024]
    return bool(decode["peers"]) and bool(rates) and rates[0]["samples"] >= samples


@pytest.mark.slow
@pytest.mark.skipif(set(ENGINE_OPTIONS) != {"torch", "mlx"}, reason="starts nodes with torch and MLX")
def test_two_nodes_with_defaults_share_the_cores(
    tiny_folder: Callable[[str], Path], tmp_path: Path, record_property: Any
) -> None:
    """Without a division and with spinning threads, the first pair is tens of times slower than the second, and what
    the router predicts from such readings is as wrong."""
    model, half = str(tiny_folder("llama")), max(1, available_cores() // 2)
    with (
        two_nodes(model, tmp_path / "defaults") as defaults,
        two_nodes(model, tmp_path / "one", "--threads", "1") as single,
    ):
        prefill, decode = defaults
        assert until(lambda: [node.ask("/status")[1]["threads"] for node in defaults] == [half, half], 60)
        assert [node.ask("/status")[1]["threads"] for node in single] == [1, 1]
        if sys.platform == "linux":  # what OpenMP itself read
            assert all("OMP_WAIT_POLICY = 'PASSIVE'" in read_output(node.log) for node in defaults)
        times = [[_handed_over_s(*pair, 300) for pair in (defaults, single)] for _ in range(3)]
        shared_s, single_s = map(min, zip(*times, strict=True))
        assert shared_s < 5 * single_s, "a guard against spinning, not a measurement"
        with client_of(defaults) as client, client_of(single) as other:
            rounds = [[_four_at_once_s(each) for each in (client, other)] for _ in range(3)]
            first, total = _measured_by_predicted(client)
        shared_s, single_s = map(min, zip(*rounds, strict=True))
        assert shared_s < 10 * single_s, "44 times, with threads that spin against each other"
        assert 1 / 10 < first < 10, "the prediction is of the right size, however busy this machine is"
        record_property(
            "report",
            f"two nodes on {available_cores()} cores, four requests at once: {shared_s:.2f} s with defaults, "
            f"{single_s:.2f} s with one thread each; first token {first:.2f}, "
            f"end {total:.2f} of the prediction",
        )
        decode.process.kill()
        assert until(lambda: prefill.ask("/status")[1]["threads"] == available_cores(), 60), "it gets them back"
