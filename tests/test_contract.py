"""The contract suite: every engine, every pair. A new engine joins by adding its name to ENGINE_OPTIONS."""

from functools import lru_cache
from itertools import pairwise

import numpy as np
import pytest

from disaggregated_inference.engines import Logits
from disaggregated_inference.kv import KVSlice
from disaggregated_inference.models import ARCHITECTURES
from tests.conftest import ENGINE_OPTIONS, LoadTiny
from tests.handoff import alone, prompt_of, read_prompt, receive, write_answer

ENGINES = tuple(ENGINE_OPTIONS)
PROMPTS = (1, 2, 127, 128, 129, 300, 1000)  # around and past the sliding window of 128
CHUNKS = (1, 64, 77, 256)  # 77 divides none of them
ANSWER = 32


@pytest.fixture(scope="session")
def prefilled(tiny_engine: LoadTiny):  # type: ignore[no-untyped-def]
    @lru_cache(maxsize=8)
    def run(engine: str, architecture: str, length: int, chunk: int) -> tuple[list[KVSlice], Logits]:
        return read_prompt(tiny_engine(engine, architecture), prompt_of(length), chunk)

    return run


@pytest.fixture(scope="session")
def oracle(tiny_engine: LoadTiny):  # type: ignore[no-untyped-def]
    return lru_cache(lambda engine, architecture, length: alone(tiny_engine(engine, architecture), prompt_of(length), ANSWER))


@pytest.mark.parametrize("target", ENGINES)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("length", PROMPTS)
@pytest.mark.parametrize("source", ENGINES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_handoff_is_token_exact(architecture, source, length, chunk, target, tiny_engine, prefilled, oracle) -> None:  # type: ignore[no-untyped-def]
    expected = oracle(target, architecture, length)
    slices, logits = prefilled(source, architecture, length, chunk)
    engine = tiny_engine(target, architecture)
    before = engine.counters.prompt_tokens, engine.counters.step_tokens
    tokens = write_answer(engine, receive(engine, slices, length), logits, ANSWER)
    assert tokens == expected
    assert engine.counters.prompt_tokens == before[0], "the decode side read the prompt again"
    assert engine.counters.step_tokens == before[1] + ANSWER - 1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_near_ties(architecture: str, tiny_engine: LoadTiny) -> None:
    """The oracle is worth something only if rounding cannot flip it, and if the prompt matters to it."""
    engine, other = (tiny_engine(name, architecture) for name in ("torch", "mlx"))
    for length in PROMPTS:
        sequence = engine.open(length + ANSWER)
        logits = engine.prefill(sequence, prompt_of(length)).numpy()[0]
        mirror = other.open(length + ANSWER)
        error = np.abs(other.prefill(mirror, prompt_of(length)).numpy()[0] - logits).max()
        second, first = np.sort(logits)[-2:]
        assert error < 1e-3
        assert first - second > 10 * error
        engine.close(sequence)
        other.close(mirror)
    answers = [alone(engine, prompt_of(300, seed=seed), 8) for seed in range(4)]
    assert all(a != b for a, b in pairwise(answers))
