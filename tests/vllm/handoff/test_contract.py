"""The contract suite with vLLM as the prefill engine: what tests/contract asks of every pair of engines, as far as it
is about the engine that computes the prompt. vLLM takes no KV in, so the rest of the suite is about other engines.

The models are those that vLLM's attention on the CPU can have, and that llama.cpp can load too.
"""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from disaggregated_inference.engines import Engine, load_engine
from disaggregated_inference.models import ModelFiles
from tests.support.engine_contract import (
    ANSWER,
    ENGINES,
    PROMPTS,
    check_a_second_turn_after_decoding_in_a_batch,
    check_batched_decode_equals_one_by_one,
    check_handoff,
    check_kept_prefix_takes_only_the_rest,
    check_no_near_ties,
    check_rollback_to_the_last_committed_chunk,
)
from tests.support.engines import ENGINE_OPTIONS, LLAMACPP, LLAMACPP_OPTIONS, LoadTiny, twin_of
from tests.support.handoff import alone, forced_logits, prompt_of, read_prompt
from tests.support.vllm_nodes import VllmHome
from tests.support.vllm_prompts import LENGTHS, chosen_prompt
from tests.support.vllm_reader import VllmReader

pytestmark = pytest.mark.slow

WHOLE = 4096  # vLLM cuts prompts into chunks of its own
SHORT_ANSWER = 16  # of llama.cpp
needs_llamacpp = pytest.mark.skipif(not LLAMACPP, reason="no llama.cpp is installed")


@pytest.fixture(scope="session")
def load(vllm_folder: Callable[[str], Path]) -> LoadTiny:
    @lru_cache
    def run(name: str, architecture: str) -> Engine:
        model = ModelFiles(architecture, vllm_folder(architecture))
        if name == "llamacpp":
            return load_engine(name, ModelFiles("twin", twin_of(model.path)), **LLAMACPP_OPTIONS)
        return load_engine(name, model, **ENGINE_OPTIONS[name])

    return run


@pytest.fixture
def tiny_engine(load: LoadTiny, home: VllmHome) -> LoadTiny:
    """In the place of the fixture of tests/contract: `vllm` is one more engine."""

    def run(name: str, architecture: str) -> Engine:
        return VllmReader(home) if name == "vllm" else load(name, architecture)  # type: ignore[return-value]

    return run


def test_no_near_ties(architecture: str, load: LoadTiny) -> None:
    check_no_near_ties(architecture, load)


@pytest.mark.parametrize("length", PROMPTS)
def test_handoff_is_token_exact(length: int, architecture: str, tiny_engine: LoadTiny) -> None:
    """One prefill of vLLM goes into every engine."""
    slices, logits = read_prompt(tiny_engine("vllm", architecture), prompt_of(length), WHOLE)
    for target in ENGINES:
        engine = tiny_engine(target, architecture)
        check_handoff(engine, slices, logits, length, alone(engine, prompt_of(length), ANSWER))


@needs_llamacpp
def test_handoff_to_llamacpp(architecture: str, tiny_engine: LoadTiny) -> None:
    """Of chosen prompts, which are good for that: half precision is far from changing their answers."""
    engine, exact = tiny_engine("llamacpp", architecture), tiny_engine("torch", architecture)
    for length in LENGTHS:
        prompt = chosen_prompt(architecture, length)
        answer = alone(engine, prompt, SHORT_ANSWER)
        logits, mirror = (forced_logits(each, prompt, answer[:-1]) for each in (exact, engine))
        second, first = np.sort(logits, axis=-1)[:, -2:].T
        assert (first - second).min() > 2 * np.abs(logits - mirror).max(), f"prompt of {length}: a near-tie"
        check_handoff(engine, *read_prompt(tiny_engine("vllm", architecture), prompt, WHOLE), length, answer)


@pytest.mark.parametrize("target", ENGINES)
def test_batched_decode_equals_one_by_one(target: str, architecture: str, tiny_engine: LoadTiny) -> None:
    check_batched_decode_equals_one_by_one(architecture, target, tiny_engine, ("vllm",))


@pytest.mark.parametrize("target", ENGINES)
def test_kept_prefix_takes_only_the_rest(target: str, architecture: str, tiny_engine: LoadTiny) -> None:
    check_kept_prefix_takes_only_the_rest(architecture, "vllm", target, tiny_engine)


@pytest.mark.parametrize("target", ENGINES)
def test_rollback_to_the_last_committed_chunk(target: str, architecture: str, tiny_engine: LoadTiny) -> None:
    check_rollback_to_the_last_committed_chunk(architecture, target, tiny_engine, "vllm")


@pytest.mark.parametrize("target", ENGINES)
def test_a_second_turn_after_decoding_in_a_batch(target: str, architecture: str, tiny_engine: LoadTiny) -> None:
    check_a_second_turn_after_decoding_in_a_batch(architecture, target, tiny_engine, "vllm")
