"""Real vLLM on the CPU, in an environment of its own (`make vllm`)."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Process
from tests.support.vllm_served import kill_and_watch, serve_vllm
from tests.support.vllm_server import NO_VLLM, VllmForker, vllm_python


@pytest.fixture(scope="session")
def vllm_forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmForker]:
    if not (python := vllm_python()):
        pytest.skip(NO_VLLM)
    forker = VllmForker(python, tmp_path_factory.mktemp("vllm") / "forker.log")
    yield forker
    forker.close()


@pytest.fixture(scope="session")
def served_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM's attention on the CPU has no heads of 16."""
    from tests.support.tiny_models import save_tiny

    return save_tiny("llama", tmp_path_factory.mktemp("served") / "llama", head_dim=32)


@pytest.fixture(scope="session")
def served(served_folder: Path) -> Iterator[Process]:
    """`disagg serve --engine vllm`. Tests may kill its vLLM: it comes back."""
    if not vllm_python():
        pytest.skip(NO_VLLM)
    os.environ["VLLM_CPU_CI_ENV"] = "1"  # no warm-up of vLLM's own
    node = serve_vllm(served_folder)
    try:
        yield node.ready()
        left = kill_and_watch(node)
    finally:
        node.end()
    assert not left, f"a killed node left {left} behind"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test` skips them before a fixture has cost anything."""
    if not vllm_python():
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=NO_VLLM))
