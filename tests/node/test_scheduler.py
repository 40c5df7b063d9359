"""The scheduler: order of work, calls, limits and its end."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from disaggregated_inference.errors import (
    KVMemoryFull,
    NodeBusy,
)
from disaggregated_inference.node.scheduler import Scheduler, Work
from tests.support.engines import LoadTiny

Folder = Callable[[str], Path]


def test_a_full_scheduler_refuses_work(tiny_engine: LoadTiny) -> None:
    scheduler = Scheduler(lambda: tiny_engine("torch", "llama"), max_works=1)
    going = [True]

    def work() -> Work[None]:
        while going[0]:
            yield

    first = scheduler.submit(work())

    def fill() -> None:
        for _ in range(1000):
            scheduler.submit(work())

    with pytest.raises(NodeBusy):
        fill()
    assert scheduler.call(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        scheduler.call(lambda: 1 // 0)
    assert scheduler.alive
    going[0] = False
    first.result(60)
    scheduler.stop()


def test_max_running_works_run_in_turn(tiny_engine: LoadTiny) -> None:
    scheduler = Scheduler(lambda: tiny_engine("torch", "llama"), max_running=2)
    begun: list[int] = []

    def work(number: int) -> Work[int]:
        begun.append(number)
        for _ in range(3):
            yield
        return len(begun)

    futures = [scheduler.submit(work(number)) for number in range(6)]
    assert scheduler.unfinished > 0
    results = [future.result(60) for future in futures]
    assert results[0] == 2, "the first was done when only two had begun"
    assert scheduler.unfinished == 0
    scheduler.stop()
    with pytest.raises(NodeBusy, match="stopped"):
        scheduler.call(lambda: 1)


def test_a_cancelled_call_is_not_run(tiny_engine: LoadTiny) -> None:
    """It is left out, and the thread goes on."""
    scheduler, go, called = Scheduler(lambda: tiny_engine("torch", "llama")), threading.Event(), list[int]()
    busy = scheduler.post(lambda: go.wait(10))
    left = scheduler.post(lambda: called.append(1))
    assert left.cancel()
    go.set()
    assert busy.result(60)
    assert scheduler.call(lambda: 5) == 5
    assert not called
    scheduler.stop()


def test_a_model_that_does_not_load() -> None:
    def load() -> None:
        raise KVMemoryFull("no room at all")

    with pytest.raises(KVMemoryFull):
        Scheduler(load)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_process_exits_cleanly(tiny_folder: Folder) -> None:
    """MLX aborts a process in which a thread ended with its streams. Three times over: it did so one time in five."""
    code = (
        "import sys; from pathlib import Path; from functools import partial\n"
        "from disaggregated_inference.api import GenerationParams\n"
        "from disaggregated_inference.engines import load_engine\n"
        "from disaggregated_inference.models import ModelFiles\n"
        "from disaggregated_inference.node.scheduler import Scheduler\n"
        "from disaggregated_inference.node.decode import DecodeNode\n"
        "from disaggregated_inference.node.kv_memory import KVMemory\n"
        "model = ModelFiles('x', Path(sys.argv[1]))\n"
        "scheduler = Scheduler(partial(load_engine, 'mlx', model))\n"
        "node, params = DecodeNode(KVMemory(scheduler), model.tokenizer), GenerationParams(max_tokens=4)\n"
        "list(node.generate_local([5, 6], params)); scheduler.stop()"
    )
    for _ in range(3):
        subprocess.run([sys.executable, "-c", code, str(tiny_folder("llama"))], check=True)
