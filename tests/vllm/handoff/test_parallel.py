"""Two workers: each tensor-parallel rank sends its heads, each pipeline stage its layers."""

from pathlib import Path

import pytest

from disaggregated_inference.models import ModelFiles
from tests.support.handoff import prompt_of
from tests.support.vllm_nodes import LIMITS, DecodeNodes, expected, hand_over, open_home
from tests.support.vllm_server import VllmForker

pytestmark = pytest.mark.slow

TENSOR, PIPELINE = "--tensor-parallel-size", "--pipeline-parallel-size"
CASES: dict[str, tuple[str, str, dict[str, int]]] = {
    "each rank has one of two heads": (TENSOR, "gpt_oss", {"intermediate_size": 128}),
    "both ranks have the one head": (TENSOR, "llama", {"num_key_value_heads": 1}),
    "each stage has half of the layers": (PIPELINE, "llama", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_two_workers(case: str, vllm_forker: VllmForker, tmp_path: Path) -> None:
    from tests.support.tiny_models import save_tiny

    option, architecture, shape = CASES[case]
    model = ModelFiles(architecture, save_tiny(f"twin_{architecture}", tmp_path / "model", head_dim=32, **shape))
    home = open_home(vllm_forker, model, tmp_path, *LIMITS, option, "2")
    decoders = DecodeNodes(model)
    try:
        decode = decoders["torch"]
        prompts = [prompt_of(length, seed=3) for length in (1, 78, 300, 1000)]
        answers = [hand_over(home, decode, prompt, 16) for prompt in prompts]
        assert [list(answer) for answer in answers] == [expected(decode, prompt, 16) for prompt in prompts]
        assert home.border.engine
        assert home.border.engine.scheduler.workers == 2
    finally:
        home.close()
        decoders.close()
