"""`--vllm-url`: a node in front of a vLLM that the user runs. Either may come first, and either may go."""

import json
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from disaggregated_inference.api import GenerationParams
from disaggregated_inference.engines import load_engine
from disaggregated_inference.errors import PeerRefused
from disaggregated_inference.models import ModelFiles
from disaggregated_inference.node import DecodeNode, PrefillContext
from disaggregated_inference.vllm_connector.messages import LOGITS_PROCESSOR
from tests.support.cluster import Process
from tests.support.engines import ENGINE_OPTIONS
from tests.support.handoff import alone, prompt_of
from tests.support.vllm_nodes import LIMITS, DecodeNodes
from tests.support.vllm_served import loading_health
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


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Arguments of a vLLM that has them, under another name."""
    from tests.support.tiny_models import save_tiny

    folder = save_tiny("llama", tmp_path_factory.mktemp("other") / "llama", seed=1, head_dim=32)
    return "--model", str(folder), "--served-model-name", "another-name"


@pytest.fixture(scope="module")
def decode(served_folder: Path) -> Iterator[DecodeNode]:
    made = DecodeNodes(ModelFiles("llama", served_folder))
    yield made["torch"]
    made.close()


def _handed_over(node: Process, decode: DecodeNode, prompt: list[int]) -> list[int]:
    body = json.dumps({"tokens": prompt}).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{node.port}/prefill", body, timeout=240) as response:
        context = PrefillContext.decode(json.loads(response.read())["context"])
    return list(decode.generate_from_kv(context, GenerationParams(max_tokens=8)))


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
        assert until(lambda: remedy in loading_health(node)["reason"], BUSY_S), loading_health(node)
        assert loading_health(node)["status"] == "loading"
    finally:
        node.end()


def test_a_running_vllm_is_used_as_it_is(attached: Process, served_folder: Path, decode: DecodeNode) -> None:
    oracle = load_engine("torch", ModelFiles("llama", served_folder), **ENGINE_OPTIONS["torch"])
    prompt = prompt_of(90, seed=21)
    assert _generate(attached, prompt, 8) == _handed_over(attached, decode, prompt) == alone(oracle, prompt, 8)
    status = attached.status()
    assert (status["status"], status["backend"], status["whole_answers"]) == ("healthy", "vllm", True)
    assert status["rates"]["prefill"]
    assert until(lambda: bool(_generate(attached, prompt, 8)) and bool(attached.status()["rates"]["decode"]))


def test_a_vllm_that_goes_makes_the_node_unhealthy_until_it_is_back(
    attached: Process, running_vllm: VllmServer, decode: DecodeNode, other_weights: tuple[str, ...]
) -> None:
    """It first comes back without our logits processor, which its user forgot: vLLM then does not start. Then with
    other weights of the same shape, which only the peer check can see."""
    epoch, port = attached.status()["epoch"], running_vllm.port
    running_vllm.kill()
    assert until(lambda: attached.status()["status"] == "unhealthy", BUSY_S)
    assert "vLLM" in attached.status()["reason"]
    running_vllm.start(port, processors="")
    assert until(lambda: running_vllm.why_stopped() != "", START_S)
    assert f"the connector needs vLLM's argument --logits-processors {LOGITS_PROCESSOR}" in running_vllm.log()
    assert attached.status()["status"] == "unhealthy"
    _come_back(running_vllm, attached, epoch, *other_weights)
    assert len(_generate(attached, prompt_of(20), 4)) == 4
    _require_refused(running_vllm, attached, decode)


def test_a_vllm_with_another_rope_is_refused(attached: Process, running_vllm: VllmServer, decode: DecodeNode) -> None:
    """The node's model files say what RoPE it should have."""
    epoch, rope = attached.status()["epoch"], {"rope_type": "default", "rope_theta": 10000.0}
    running_vllm.kill()
    _come_back(running_vllm, attached, epoch, "--hf-overrides", json.dumps({"rope_parameters": rope}))
    _require_refused(running_vllm, attached, decode)


def _come_back(vllm: VllmServer, node: Process, epoch: str, *arguments: str) -> None:
    """At the same port, for this run with these arguments."""
    vllm.start(vllm.port, *arguments)
    vllm.wait_until_ready()
    assert until(lambda: node.status()["status"] == "healthy" and node.status()["epoch"] != epoch, START_S)


def _require_refused(vllm: VllmServer, node: Process, decode: DecodeNode) -> None:
    """By the decode node, and vLLM holds nothing for it."""
    with pytest.raises(PeerRefused, match="the prefill node computes other values than this node"):
        _handed_over(node, decode, prompt_of(90, seed=22))
    assert until(lambda: vllm.metric("vllm:kv_cache_usage_perc") == 0, BUSY_S)
    assert until(lambda: not decode.open_requests and decode.kv_memory.reserved_bytes == 0, BUSY_S)


def test_a_node_that_stops_leaves_the_users_vllm_alone(
    attached: Process, running_vllm: VllmServer, socket_path: Path
) -> None:
    attached.process.send_signal(signal.SIGTERM)
    assert attached.process.wait(timeout=120) == 0
    assert not socket_path.exists()
    running_vllm.wait_until_ready()
