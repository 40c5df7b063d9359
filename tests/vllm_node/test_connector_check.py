"""A connector that cannot attach: the node says why, and what to do."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from disaggregated_inference.errors import BadRequest, EngineUnavailable
from disaggregated_inference.vllm_connector.connection import NodeLink
from disaggregated_inference.vllm_connector.messages import (
    PROTOCOL,
    QUESTION_PARAM,
    STATE_PARAM,
    AttachScheduler,
    LinkState,
)
from disaggregated_inference.vllm_connector.scheduler import SchedulerHalf
from disaggregated_inference.vllm_node.attached import AttachedVllm, start_command
from disaggregated_inference.vllm_node.client import Computed
from disaggregated_inference.vllm_node.connector_check import explanation
from disaggregated_inference.vllm_node.connector_server import ConnectorServer
from disaggregated_inference.vllm_node.staging import Staging
from tests.support.paged_model import spec
from tests.support.waiting import until

NODE = Path("/run/node.sock")


@contextmanager
def scheduler_half(path: Path) -> Iterator[SchedulerHalf]:
    attach = AttachScheduler(
        protocol=PROTOCOL,
        vllm_version="test",
        engine="one",
        pid=1,
        workers=1,
        max_tokens=64,
        max_step_tokens=64,
        max_sequences=8,
        block_tokens=4,
        blocks=4,
        prefix_caching=True,
        windows=(0,),
    )
    with closing(SchedulerHalf(NodeLink(str(path), attach, lambda accept, memory: None), [])) as half:
        yield half


def _asked(half: SchedulerHalf, **params: Any) -> Computed:
    """As vLLM puts it into its response."""
    return Computed(kv_transfer_params=half.answer(SimpleNamespace(extra_args={"kv_transfer_params": params})))


def _explained(half: SchedulerHalf, path: Path) -> str:
    return explanation(_asked(half, **{QUESTION_PARAM: True}), path, "vllm serve m")


def _until_explained(half: SchedulerHalf, path: Path, words: str) -> bool:
    return until(lambda: words in _explained(half, path))


def test_no_socket_no_listener_and_no_permission(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with scheduler_half(path) as half:
        assert _until_explained(half, path, "there is no such socket where vLLM runs: in a container, mount its folder")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
            left.bind(str(path))
            assert _until_explained(half, path, "no node listens there")
        path.unlink()
        with closing(ConnectorServer(path, spec(), Staging(1 << 20))):
            assert _until_explained(half, path, "")


@pytest.mark.skipif(os.geteuid() != 0, reason="it becomes another user")
def test_another_user_is_told_to_use_the_nodes_user(tmp_path: Path) -> None:
    path, child = tmp_path / "s", 0
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    with closing(ConnectorServer(path, spec(), Staging(1 << 20))):
        read, write = os.pipe()
        if not (child := os.fork()):
            os.setuid(65534)
            with scheduler_half(path) as half:
                _until_explained(half, path, "user 65534, who runs vLLM, may not open it")
                os.write(write, _explained(half, path).encode())
            os._exit(0)
        os.close(write)
        said = os.read(read, 4096).decode()
        os.close(read)
        os.waitpid(child, 0)
    assert "cannot reach this node" in said
    assert "run vLLM and the node as one user" in said


def test_another_socket_is_named_with_the_option(tmp_path: Path) -> None:
    with scheduler_half(tmp_path / "other") as half:
        assert _until_explained(half, NODE, f"this node listens at {NODE}")
        assert f"start this node with --vllm-socket {tmp_path / 'other'}" in _explained(half, NODE)


def test_a_request_that_asks_nothing_gets_nothing(tmp_path: Path) -> None:
    with scheduler_half(tmp_path / "s") as half:
        assert half.answer(SimpleNamespace(extra_args=None)) is None
        assert half.answer(SimpleNamespace(extra_args={"kv_transfer_params": {"disagg_ticket": "t"}})) is None


def test_a_vllm_without_a_connector_or_with_another_version() -> None:
    assert explanation(Computed(), NODE, "vllm serve m") == (
        "this vLLM runs without the connector of this version. Start it with: vllm serve m"
    )
    for told in ({"protocol": 99, "socket": str(NODE), "trouble": ""}, {"protocol": 1}):
        said = explanation(Computed(kv_transfer_params={STATE_PARAM: told}), NODE, "vllm serve m")
        assert "install the same disaggregated-inference for both" in said
    assert set(LinkState.__struct_fields__) == {"protocol", "socket", "trouble"}


def test_what_a_worker_cannot_do_is_told_until_it_can(tmp_path: Path) -> None:
    """Its memory cannot be pinned, or its model is another: it hangs up, and dials again."""
    from disaggregated_inference.vllm_connector.messages import Accept

    fails = threading.Event()
    fails.set()

    def use(accept: Accept, memory: object) -> None:
        if fails.is_set():
            raise RuntimeError("CUDA cannot pin the shared memory (error 2): give the node less --kv-memory")

    from tests.support.paged_model import PagedModel

    border = ConnectorServer(tmp_path / "s", spec(), Staging(1 << 20))
    with closing(border):
        model = PagedModel(border.path)
        link = model.workers[0]._link
        border.wait_attached(60)
        real, link._on_region = link._on_region, use
        border.refuse_all("the line is cut")
        assert until(lambda: "worker 0 cannot work with this node: CUDA cannot pin" in border.trouble())
        steps: list[str] = []
        with pytest.raises(EngineUnavailable, match="did not attach: vLLM's worker 0 cannot work with this node: CUDA"):
            border.wait_attached(0.1, begin=steps.append)
        assert "give the node less --kv-memory" in steps[0], "the terminal and /health show it while it waits"
        link._on_region = real
        border.wait_attached(60)
        assert border.trouble() == ""
        model.close()


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://h:1/v1/", "http://h:1"),
        ("unix:/run/v.sock", "unix:/run/v.sock"),
        ("unix:///run/v.sock", "unix:/run/v.sock"),
    ],
)
def test_addresses_of_a_running_vllm(given: str, found: str) -> None:
    assert AttachedVllm(given, "").url == found


@pytest.mark.parametrize("given", ["unix:v.sock", "unix:", "ftp://h", "http://"])
def test_other_addresses_are_refused_with_an_example(given: str) -> None:
    with pytest.raises(BadRequest, match=r"--vllm-url: .* give one such as "):
        AttachedVllm(given, "")


def test_the_command_for_a_vllm_installs_what_this_runs_from() -> None:
    """No index has the package: pip takes the checkout."""
    checkout = Path(__file__).parents[2]
    command = start_command("m", "{}", "a:B")
    assert command.startswith(f"pip install --no-deps {checkout} && vllm serve m ")
    assert command.endswith("--enable-prompt-tokens-details")
