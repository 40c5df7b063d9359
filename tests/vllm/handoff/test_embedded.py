"""The embedded model, and the manager of pages that keeps all tokens of sliding layers."""

from collections.abc import Callable
from pathlib import Path

import pytest

from disaggregated_inference.models import ModelFiles
from tests.support.handoff import prompt_of
from tests.support.vllm_nodes import LIMITS, DecodeNodes, expected, hand_over, open_home
from tests.support.vllm_server import VllmForker

pytestmark = pytest.mark.slow

QUESTIONS = (
    "What is the capital of France?",
    "A train travels 120 km in 2 hours, then 45 km in 30 minutes. What is its average speed?",
    "Name three rivers of Europe.",
)


def test_embedded_model(vllm_forker: VllmForker, smollm2: ModelFiles, tmp_path: Path) -> None:
    home, decoders = open_home(vllm_forker, smollm2, tmp_path, *LIMITS), DecodeNodes(smollm2)
    try:
        for question, target in zip(QUESTIONS, ("mlx", "torch", "llamacpp"), strict=True):
            prompt = smollm2.tokenizer.encode_chat([{"role": "user", "content": question}])
            answer = hand_over(home, decoders[target], prompt, 24)
            tokens = list(answer)
            assert tokens == expected(decoders[target], prompt, 24)[: len(tokens)]
            assert len(tokens) > 4  # the model may end its answer
            assert answer.metrics.prompt_tokens_recomputed == 0
    finally:
        home.close()
        decoders.close()


def test_hybrid_manager_off(vllm_forker: VllmForker, vllm_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Sliding and full layers then share one block table."""
    model = ModelFiles("gpt_oss", vllm_folder("gpt_oss"))
    home = open_home(vllm_forker, model, tmp_path, *LIMITS, "--disable-hybrid-kv-cache-manager")
    decoders = DecodeNodes(model)
    try:
        assert home.border.engine
        assert home.border.engine.scheduler.windows == (0,)
        prompts = [prompt_of(length, seed=6) for length in (1, 128, 300, 1000)]
        answers = [hand_over(home, decoders["torch"], prompt, 16) for prompt in prompts]
        assert [list(each) for each in answers] == [expected(decoders["torch"], prompt, 16) for prompt in prompts]
    finally:
        home.close()
        decoders.close()
