"""vLLM as a child: it dies and comes back, it says why it does not start, and none of it is left behind."""

import asyncio
import errno
import os
import re
import signal
from functools import partial
from pathlib import Path

import pytest

from disaggregated_inference.vllm_node.client import VllmAddress, VllmClient
from tests.support.cluster import Process
from tests.support.vllm_served import (
    command_of,
    descendants,
    engine_cores,
    errno_of_stranger,
    guards,
    listening_ports,
    loading_health,
    runs,
    serve_vllm,
)
from tests.support.waiting import until

pytestmark = pytest.mark.slow
RESTART_S = 400.0  # two cores may be busy with other tests
LOADING = re.compile(r"vLLM: (starting|loading weights|reserving KV memory) \(\d+ s so far\)")


def test_no_other_user_reaches_vllms_http(served: Process) -> None:
    """Some of its paths need no key. It listens at a socket in a folder of this user, and at no port."""
    below = descendants(served.process.pid)
    words = next(words for pid in below if "--uds" in (words := command_of(pid).split()))
    path = Path(words[words.index("--uds") + 1])
    assert asyncio.run(VllmClient(lambda: VllmAddress(f"unix:{path}")).is_healthy())
    assert path.parent.stat().st_mode & 0o077 == 0
    assert not any(asyncio.run(_healthy_at(listening_ports(below)))), "torch's own ports speak no HTTP"
    if os.geteuid() == 0:
        assert errno_of_stranger(path) == errno.EACCES


async def _healthy_at(ports: list[int]) -> list[bool]:
    clients = [VllmClient(partial(VllmAddress, f"http://127.0.0.1:{port}")) for port in ports]
    return await asyncio.gather(*(client.is_healthy() for client in clients))


def _health(node: Process) -> str:
    status = node.status()
    return f"{status['status']}: {status.get('reason', '')}"


def test_a_vllm_that_dies_is_restarted(served: Process) -> None:
    """Its engine dies; then, while it loads again, its guard. Nothing of the old one is left: its engine would hold the
    memory that the next one needs."""
    before, epoch = engine_cores(served.process.pid), served.status()["epoch"]
    assert before
    os.kill(before[0], signal.SIGKILL)
    assert until(lambda: "vLLM" in _health(served) and "unhealthy" in _health(served), RESTART_S), _health(served)
    assert until(lambda: bool(set(engine_cores(served.process.pid)) - set(before)), RESTART_S)
    old = descendants(served.process.pid)
    os.kill(guards(served.process.pid)[0], signal.SIGKILL)
    assert until(lambda: not any(map(runs, old)), RESTART_S)
    assert until(lambda: served.status()["status"] == "healthy", RESTART_S), _health(served)
    after = engine_cores(served.process.pid)
    assert after
    assert not set(after) & {*before, *old}
    assert served.status()["epoch"] != epoch, "decode nodes must check it again"
    assert '"level": "error"' in served.said()
    assert "it starts again in 1 s" in served.said()
    assert "it starts again in 2 s" in served.said()


def test_ctrl_c_while_vllm_loads(served: Process, served_folder: Path) -> None:
    """Meanwhile /health tells vLLM's step. vLLM is killed, as it is where the system has no memory: neither that nor
    what it says at its end is an error. `served` sets the environment up."""
    node = serve_vllm(served_folder, name="other")
    try:
        assert until(lambda: '"logger": "vllm_node.log_lines"' in node.said(), RESTART_S)
        assert loading_health(node)["status"] == "loading"
        assert until(lambda: LOADING.fullmatch(loading_health(node)["reason"]) is not None, RESTART_S)
        below = descendants(node.process.pid)
        node.process.send_signal(signal.SIGINT)
        assert node.process.wait(timeout=RESTART_S) == 0
        assert not any(map(runs, below))
        said = node.said()
        assert "out of memory" not in said
        assert not [line for line in said.splitlines() if line.startswith("error: ") or '"level": "error"' in line]
    finally:
        node.end()


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
