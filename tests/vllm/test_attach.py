"""`--vllm-url`: a node in front of a vLLM that the user runs. Either may come first, and either may go."""

import json
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from disaggregated_inference.engines import load_engine
from disaggregated_inference.models import ModelFiles
from disaggregated_inference.vllm_connector.messages import LOGITS_PROCESSOR
from tests.support.cluster import Process
from tests.support.engines import ENGINE_OPTIONS
from tests.support.handoff import alone, prompt_of
from tests.support.vllm_nodes import LIMITS
from tests.support.vllm_server import BUSY_S, START_S, VllmForker, VllmServer
from tests.support.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def socket_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attach") / "vllm.sock"


@pytest.fixture(scope="module")
def running_vllm(vllm_forker: VllmForker, served_folder: Path, socket_path: Path) -> Iterator[VllmServer]:
    """Started before its node."""
    server = VllmServer(
        vllm_forker, ModelFiles("llama", served_folder), socket_path, socket_path.parent / "log", *LIMITS
    )
    server.wait_until_ready()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def attached(running_vllm: VllmServer, served_folder: Path, socket_path: Path) -> Iterator[Process]:
    url = ["--vllm-url", running_vllm.address.url, "--vllm-socket", str(socket_path), "--kv-memory", "64M"]
    node = Process("spark-2", "prefill", "vllm", str(served_folder), *url)
    yield node.ready()
    node.end()


def _loading(node: Process) -> Any:
    """What /health says before the node serves."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"http://127.0.0.1:{node.port}/health", timeout=30)
    with refused.value as response:
        return json.loads(response.read())


def _generate(node: Process, tokens: list[int], count: int) -> Any:
    body = json.dumps({"tokens": tokens, "max_tokens": count, "ignore_eos": True}).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{node.port}/generate", body, timeout=240) as response:
        return json.loads(response.read())["tokens"]


def test_a_connector_that_waits_elsewhere_is_told_of(
    running_vllm: VllmServer, served_folder: Path, socket_path: Path
) -> None:
    """On the terminal and in /health, with the option that helps."""
    elsewhere = socket_path.with_name("elsewhere.sock")
    url = ["--vllm-url", running_vllm.address.url, "--vllm-socket", str(elsewhere), "--kv-memory", "64M"]
    node = Process("spark-2", "prefill", "vllm", str(served_folder), *url)
    remedy = f"start this node with --vllm-socket {socket_path}"
    try:
        assert until(lambda: remedy in node.said(), START_S), node.said()
        assert until(lambda: remedy in _loading(node)["reason"], BUSY_S), _loading(node)
        assert _loading(node)["status"] == "loading"
    finally:
        node.end()


def test_a_running_vllm_is_used_as_it_is(attached: Process, served_folder: Path) -> None:
    oracle = load_engine("torch", ModelFiles("llama", served_folder), **ENGINE_OPTIONS["torch"])
    prompt = prompt_of(90, seed=21)
    assert _generate(attached, prompt, 8) == alone(oracle, prompt, 8)
    status = attached.status()
    assert (status["status"], status["backend"], status["whole_answers"]) == ("healthy", "vllm", True)
    assert status["rates"]["prefill"]
    assert until(lambda: bool(_generate(attached, prompt, 8)) and bool(attached.status()["rates"]["decode"]))


def test_a_vllm_that_goes_makes_the_node_unhealthy_until_it_is_back(
    attached: Process, running_vllm: VllmServer
) -> None:
    """It first comes back without our logits processor, which its user forgot: vLLM then does not start."""
    epoch, port = attached.status()["epoch"], running_vllm.port
    running_vllm.kill()
    assert until(lambda: attached.status()["status"] == "unhealthy", BUSY_S)
    assert "vLLM" in attached.status()["reason"]
    running_vllm.start(port, processors="")
    assert until(lambda: running_vllm.why_stopped() != "", START_S)
    assert f"the connector needs vLLM's argument --logits-processors {LOGITS_PROCESSOR}" in running_vllm.log()
    assert attached.status()["status"] == "unhealthy"
    running_vllm.start(port, "--served-model-name", "another-name")
    running_vllm.wait_until_ready()
    assert until(lambda: attached.status()["status"] == "healthy", START_S), attached.status()
    assert attached.status()["epoch"] != epoch
    assert len(_generate(attached, prompt_of(20), 4)) == 4


def test_a_node_that_stops_leaves_the_users_vllm_alone(
    attached: Process, running_vllm: VllmServer, socket_path: Path
) -> None:
    attached.process.send_signal(signal.SIGTERM)
    assert attached.process.wait(timeout=120) == 0
    assert not socket_path.exists()
    running_vllm.wait_until_ready()
