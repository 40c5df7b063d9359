"""An engine computes with its node's share of the cores, which changes when nodes start and end."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from disaggregated_inference.cores import CoreShare, available_cores
from disaggregated_inference.engines import load_engine
from disaggregated_inference.models import ModelStore
from disaggregated_inference.node.engine_threads import EngineThreads
from disaggregated_inference.node.scheduler import Scheduler
from disaggregated_inference.timeouts import NodeTimeouts
from tests.support.command import read_output
from tests.support.engines import ENGINE_OPTIONS, LLAMACPP, LoadTiny
from tests.support.handoff import alone, prompt_of
from tests.support.node_process import Node
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

    def follows(count: int) -> bool:
        threads.follow(scheduler)
        return engine.threads == count

    try:
        assert engine.threads == 4
        other.join()
        assert until(lambda: follows(2))
        other.leave()
        assert until(lambda: follows(4))
    finally:
        scheduler.call(lambda: engine.set_threads(1))
        scheduler.stop()
    other.join()
    threads.follow(scheduler)  # a stopped scheduler is left alone


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
def two_nodes(model: str, folder: Path, *arguments: str) -> Iterator[tuple[Node, Node]]:
    """As a user starts them, in a machine of their own."""
    folder.mkdir()
    environment = {"TMPDIR": str(folder), "OMP_NUM_THREADS": "", "OMP_WAIT_POLICY": "", "OMP_DISPLAY_ENV": "TRUE"}
    shared = ("--model", model, "--prefix-memory", "0", *arguments)
    with ExitStack() as stack:
        nodes = []
        for role in ("prefill", "decode"):
            nodes.append(Node(role, *shared, forked=False, **environment))
            stack.callback(nodes[-1].stop)
        yield nodes[0], nodes[1]


def _handed_over_s(prefill: Node, decode: Node, length: int) -> float:
    started = time.perf_counter()
    _, read = prefill.ask("/prefill", {"tokens": prompt_of(length), "wait": False})
    _, answer = decode.ask("/decode", {"context": read["context"], "max_new_tokens": 32})
    assert len(answer["tokens"]) == 32
    return time.perf_counter() - started


@pytest.mark.slow
@pytest.mark.skipif(set(ENGINE_OPTIONS) != {"torch", "mlx"}, reason="starts nodes with torch and MLX")
def test_two_nodes_with_defaults_share_the_cores(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Without a division and with spinning threads, the first pair is tens of times slower than the second."""
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
        times = [[_handed_over_s(*pair, 300) for pair in (defaults, single)] for _ in range(5)]
        shared_s, single_s = map(min, zip(*times, strict=True))
        assert shared_s < 5 * single_s, "a guard against spinning, not a measurement"
        decode.process.kill()
        assert until(lambda: prefill.ask("/status")[1]["threads"] == available_cores(), 60), "it gets them back"
