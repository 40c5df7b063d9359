"""vLLM as a child: it dies and comes back, it says why it does not start, and none of it is left behind."""

import os
import signal
from pathlib import Path

import pytest

from tests.support.cluster import Process
from tests.support.vllm_served import engine_cores, serve_vllm
from tests.support.waiting import until

pytestmark = pytest.mark.slow
RESTART_S = 400.0  # two cores may be busy with other tests


def _health(node: Process) -> str:
    status = node.status()
    return f"{status['status']}: {status.get('reason', '')}"


def test_a_vllm_that_dies_is_restarted(served: Process) -> None:
    before, epoch = engine_cores(served.process.pid), served.status()["epoch"]
    assert before
    os.kill(before[0], signal.SIGKILL)
    assert until(lambda: "vLLM" in _health(served) and "unhealthy" in _health(served), 120), _health(served)
    assert until(lambda: served.status()["status"] == "healthy", RESTART_S), _health(served)
    after = engine_cores(served.process.pid)
    assert after
    assert not set(after) & set(before)
    assert served.status()["epoch"] != epoch, "decode nodes must check it again"
    assert '"level": "error"' in served.said()
    assert "it starts again in 1 s" in served.said()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--no-such-argument", "--vllm-args: vLLM does not take them: unrecognized arguments: --no-such-argument"),
        ("--kv-cache-memory-bytes 9000000000000", "out of memory"),
    ],
)
def test_a_vllm_that_does_not_start_says_why(served: Process, served_folder: Path, arguments: str, said: str) -> None:
    """`served` sets the environment up."""
    node = serve_vllm(served_folder, arguments, "other")
    try:
        assert node.process.wait(timeout=RESTART_S) == 1
        error = next(line for line in reversed(node.said().splitlines()) if line.startswith("error: "))
        assert said in error
        assert "--vllm-args" in error
    finally:
        node.end()
