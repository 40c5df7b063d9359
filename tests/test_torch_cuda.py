"""The CUDA half of the torch engine: flash attention over the arena, slices behind events, decode in graphs."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from disaggregated_inference.engines import load_engine
from disaggregated_inference.engines.torch.attention import attend
from disaggregated_inference.models import ARCHITECTURES, ModelFiles
from tests.handoff import alone, forced_logits, prompt_of, read_prompt, receive

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize(("n", "total"), [(1, 1), (1, 700), (129, 129), (100, 700), (2048, 2048), (4000, 6048)])
def test_fused_attention_equals_plain(n: int, total: int, window: int, with_sinks: bool) -> None:
    """Every fused path (flash, cuDNN in one part and in two) against the formula in float32."""
    generator = torch.Generator("cuda").manual_seed(n + total)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    total = min(total, n + window - 1) if window else total  # a sliding layer has no more
    query, keys, values = draw(n, 8, 64), draw(total, 2, 64), draw(total, 2, 64)
    sinks = draw(8) if with_sinks else None
    exact = attend(query, keys, values, 0.125, window, sinks)
    fused = attend(query.bfloat16(), keys.bfloat16(), values.bfloat16(), 0.125, window, sinks).float()
    assert (fused - exact).abs().max() < 0.05
    assert (fused - exact).abs().mean() < 0.004


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_bfloat16_agrees_with_float32(architecture: str, tiny_folder: Callable[[str], Path]) -> None:
    """Prompt and graph decode. Mixtures of experts are left out: in bfloat16 a random router flips by itself."""
    model = ModelFiles(architecture, tiny_folder(architecture))
    exact = load_engine("torch", model, device="cuda", dtype="float32", kv_bytes=1 << 28)
    fast = load_engine("torch", model, device="cuda", dtype="bfloat16", kv_bytes=1 << 28)
    for length in (1, 127, 300, 1500):
        prompt = prompt_of(length)
        answer = alone(exact, prompt, 16)
        reference, logits = (forced_logits(engine, prompt, answer) for engine in (exact, fast))
        error = np.abs(logits - reference).mean() / np.abs(reference).mean()
        assert error < 0.1, f"{length} tokens: {error}"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_chunks_streamed_and_batched_in_bfloat16(architecture: str, tiny_folder: Callable[[str], Path]) -> None:
    """In one engine and one dtype, a hand-off in chunks stays as close to the plain run as bfloat16 allows."""
    model = ModelFiles(architecture, tiny_folder(architecture))
    engine = load_engine("torch", model, device="cuda", dtype="bfloat16", kv_bytes=1 << 28)
    prompts = [prompt_of(n) for n in (300, 129, 64)]
    plain = [forced_logits(engine, prompt, [7, 9, 11]) for prompt in prompts]
    arrived = [receive(engine, read_prompt(engine, prompt, 77)[0], len(prompt)) for prompt in prompts]
    for step, token in enumerate((7, 9, 11), start=1):
        rows = engine.step(arrived, [token] * 3).numpy()
        for row, reference in zip(rows, plain, strict=True):
            assert np.abs(row - reference[step]).mean() / np.abs(reference[step]).mean() < 0.1
