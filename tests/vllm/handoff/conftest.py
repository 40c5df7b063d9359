"""Real vLLM on the CPU, in an environment of its own (`make vllm`): one server per model."""

import gc
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import pytest

from disaggregated_inference.models import ModelFiles
from tests.support.vllm_nodes import DecodeNodes, VllmHome, open_home
from tests.support.vllm_server import VllmForker

ARCHITECTURES = ("llama", "qwen3_moe", "gpt_oss")


@pytest.fixture(scope="session")
def vllm_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tiny models for vLLM, whose CPU attention has no heads of 16. Their weights are those of the twins, so that
    llama.cpp can load them too."""
    from tests.support.tiny_models import save_tiny

    root = tmp_path_factory.mktemp("tiny-vllm")
    return lru_cache(lambda architecture: save_tiny(f"twin_{architecture}", root / architecture, head_dim=32))


@pytest.fixture(scope="session")
def homes(
    vllm_forker: VllmForker, vllm_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], VllmHome]]:
    """The home of an architecture. Starting the next one ends the last: tests are grouped by architecture."""
    made: dict[str, VllmHome] = {}

    def home(architecture: str) -> VllmHome:
        if architecture not in made:
            for name in list(made):
                made.pop(name).close()
            model = ModelFiles(architecture, vllm_folder(architecture))
            made[architecture] = open_home(vllm_forker, model, tmp_path_factory.mktemp(architecture))
        return made[architecture]

    yield home
    for last in made.values():
        last.close()


@pytest.fixture(scope="session", params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def home(architecture: str, homes: Callable[[str], VllmHome]) -> VllmHome:
    return homes(architecture)


@pytest.fixture(scope="session")
def decoders(architecture: str, vllm_folder: Callable[[str], Path]) -> Iterator[DecodeNodes]:
    made = DecodeNodes(ModelFiles(architecture, vllm_folder(architecture)))
    yield made
    made.close()
    gc.collect()
