"""Prompt logprobs as transformers computes them, and checks against them."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from disaggregated_inference.api import PromptLogprob

TOLERANCE = 2e-4  # the engines themselves differ by as much in float32


@lru_cache
def _model(folder: Path):  # type: ignore[no-untyped-def]
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def transformers_logprobs(folder: Path, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Row i: the log probabilities of every token at position i + 1."""
    import torch

    with torch.inference_mode():
        logits = _model(folder)(torch.tensor([list(tokens)])).logits[0, :-1]
        found: NDArray[np.float32] = torch.log_softmax(logits.float(), dim=-1).numpy()
        return found


def check_prompt_logprobs(
    found: Sequence[PromptLogprob], expected: NDArray[np.float32], tokens: Sequence[int], alternatives: int
) -> None:
    assert [each.token for each in found] == list(tokens)
    assert (found[0].logprob, found[0].top_logprobs) == (None, ())
    own = expected[np.arange(len(tokens) - 1), list(tokens[1:])]
    assert [each.logprob for each in found[1:]] == pytest.approx(own.tolist(), abs=TOLERANCE)
    for each, row in zip(found[1:], expected, strict=True):
        assert len(each.top_logprobs) == alternatives
        logprobs = [top.logprob for top in each.top_logprobs]
        assert logprobs == sorted(logprobs, reverse=True)
        assert logprobs == pytest.approx(np.sort(row)[::-1][:alternatives].tolist(), abs=TOLERANCE)
        assert logprobs == pytest.approx([row[top.token] for top in each.top_logprobs], abs=TOLERANCE)
        for top in each.top_logprobs:
            assert top.token != each.token or top.logprob == each.logprob, "one number for one token"
