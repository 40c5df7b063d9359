"""The CUDA half of the torch engine: flash attention over the arena, slices behind events, decode in graphs."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from disaggregated_inference.engines import load_engine
from disaggregated_inference.models import ARCHITECTURES, ModelFiles
from tests.handoff import alone, forced_logits, prompt_of, read_prompt, receive

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_flash_path_agrees_with_float32(architecture: str, tiny_folder: Callable[[str], Path]) -> None:
    """bfloat16 through the flash kernel against float32 through plain attention, prompt and graph decode."""
    model = ModelFiles(architecture, tiny_folder(architecture))
    exact = load_engine("torch", model, device="cuda", dtype="float32", kv_bytes=1 << 28)
    fast = load_engine("torch", model, device="cuda", dtype="bfloat16", kv_bytes=1 << 28)
    for length in (1, 127, 300, 1000):
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
