"""The contract suite: every engine, every pair. A new engine joins by adding its name to ENGINE_OPTIONS.

llama.cpp keeps the contract too, and is in what a single engine must do; as one of a pair, which its half precision
makes a matter of its own, it is in tests/engines/test_llamacpp.py. A vLLM takes the place of the prefill engine in
tests/vllm/handoff/test_contract.py (`make vllm`).
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest

from disaggregated_inference.engines import Engine, Logits, load_engine
from disaggregated_inference.kv import KVSlice
from disaggregated_inference.models import ARCHITECTURES, ModelFiles
from tests.support.engine_contract import (
    ANSWER,
    CHUNKS,
    ENGINES,
    EVERY,
    PROMPTS,
    check_a_chunk_that_fails_half_way_breaks_its_sequence_only,
    check_a_second_turn_after_decoding_in_a_batch,
    check_bad_slices_are_refused_and_leave_the_engine_usable,
    check_bad_tokens_and_batches_are_refused_and_change_nothing,
    check_batched_decode_equals_one_by_one,
    check_export_in_the_middle_of_an_answer,
    check_handoff,
    check_kept_prefix_takes_only_the_rest,
    check_no_near_ties,
    check_rollback_to_the_last_committed_chunk,
    check_room_is_kept,
    check_single_rows_of_the_logits,
)
from tests.support.engines import LoadTiny
from tests.support.handoff import alone, prompt_of, read_prompt, receive, write_answer

pytestmark = pytest.mark.slow

BFLOAT16_TOLERANCE = 0.1  # of the largest logit; two engines on random weights part by 0.05 by themselves

Prefilled = Callable[[str, str, int, int], tuple[list[KVSlice], Logits]]
Oracle = Callable[[str, str, int], list[int]]
LoadSmollm2 = Callable[[str], Engine]
Record = Callable[[str, object], None]


@pytest.fixture(scope="session")
def prefilled(tiny_engine: LoadTiny) -> Prefilled:
    @lru_cache(maxsize=8)
    def run(engine: str, architecture: str, length: int, chunk: int) -> tuple[list[KVSlice], Logits]:
        return read_prompt(tiny_engine(engine, architecture), prompt_of(length), chunk)

    return run


@pytest.fixture(scope="session")
def oracle(tiny_engine: LoadTiny) -> Oracle:
    @lru_cache
    def run(engine: str, architecture: str, length: int) -> list[int]:
        return alone(tiny_engine(engine, architecture), prompt_of(length), ANSWER)

    return run


def _handoffs() -> list[tuple[str, str, int, int, str]]:
    """Every engine pair, on every architecture, with every prompt length. Chunk sizes rotate, so that each of them
    meets every length, every engine and every architecture; both targets share one prefill."""
    return [
        (architecture, source, length, CHUNKS[(a + 2 * s + n) % len(CHUNKS)], target)
        for a, architecture in enumerate(ARCHITECTURES)
        for s, source in enumerate(ENGINES)
        for n, length in enumerate(PROMPTS)
        for target in ENGINES
    ]


def test_the_handoffs_cover_every_pair_of_values() -> None:
    values = (ARCHITECTURES, ENGINES, PROMPTS, CHUNKS, ENGINES)
    for (i, first), (j, second) in combinations(enumerate(values), 2):
        assert {(case[i], case[j]) for case in _handoffs()} == set(product(first, second))
    assert {(case[0], case[1], case[4]) for case in _handoffs()} == set(product(ARCHITECTURES, ENGINES, ENGINES))


@pytest.mark.parametrize(("architecture", "source", "length", "chunk", "target"), _handoffs())
def test_handoff_is_token_exact(
    architecture: str,
    source: str,
    length: int,
    chunk: int,
    target: str,
    tiny_engine: LoadTiny,
    prefilled: Prefilled,
    oracle: Oracle,
) -> None:
    expected = oracle(target, architecture, length)
    slices, logits = prefilled(source, architecture, length, chunk)
    check_handoff(tiny_engine(target, architecture), slices, logits, length, expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_near_ties(architecture: str, tiny_engine: LoadTiny) -> None:
    check_no_near_ties(architecture, tiny_engine)


@pytest.mark.parametrize("target", ENGINES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_batched_decode_equals_one_by_one(architecture: str, target: str, tiny_engine: LoadTiny) -> None:
    check_batched_decode_equals_one_by_one(architecture, target, tiny_engine)


@pytest.mark.parametrize("name", EVERY)
def test_single_rows_of_the_logits(name: str, tiny_engine: LoadTiny) -> None:
    check_single_rows_of_the_logits(name, tiny_engine)


@pytest.mark.parametrize("target", ENGINES)
@pytest.mark.parametrize("source", ENGINES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kept_prefix_takes_only_the_rest(architecture: str, source: str, target: str, tiny_engine: LoadTiny) -> None:
    check_kept_prefix_takes_only_the_rest(architecture, source, target, tiny_engine)


@pytest.mark.parametrize("target", ENGINES)
@pytest.mark.parametrize("source", ENGINES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_export_in_the_middle_of_an_answer(architecture: str, source: str, target: str, tiny_engine: LoadTiny) -> None:
    check_export_in_the_middle_of_an_answer(architecture, source, target, tiny_engine)


@pytest.mark.parametrize("target", ENGINES)
@pytest.mark.parametrize("source", ENGINES)
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_bfloat16_logits_stay_close(
    architecture: str, source: str, target: str, tiny_folder: Callable[[str], Path], record_property: Record
) -> None:
    """bfloat16 has 8 bits of mantissa: engines drift apart by themselves. The hand-off must add nothing to that."""
    model = ModelFiles(architecture, tiny_folder(architecture))
    near, far = (load_engine(name, model, dtype="bfloat16") for name in (target, source))
    prompt = prompt_of(300)
    slices, logits = read_prompt(far, prompt, 128)
    reference = near.open(400)
    whole = near.prefill(reference, prompt).numpy()[0]
    arrived = receive(near, slices, 300)
    differences = [np.abs(logits.numpy()[0] - whole).max() / np.abs(whole).max()]
    agreed = []
    for token in alone(near, prompt, 16):
        a, b = (near.step([s], [token]).numpy()[0] for s in (arrived, reference))
        differences.append(np.abs(a - b).max() / np.abs(b).max())
        agreed.append(int(a.argmax() == b.argmax()))
    record_property(
        "report",
        f"bfloat16 {source} -> {target}, {architecture}: worst error {max(differences):.3f} of the largest logit, "
        f"top-1 agreement {sum(agreed)} of {len(agreed)}",
    )
    assert max(differences) < BFLOAT16_TOLERANCE
    assert slices[0].keys.dtype == np.uint16


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_bad_slices_are_refused_and_leave_the_engine_usable(
    architecture: str, name: str, tiny_engine: LoadTiny
) -> None:
    check_bad_slices_are_refused_and_leave_the_engine_usable(architecture, name, tiny_engine)


@pytest.mark.parametrize("name", EVERY)
def test_room_is_kept(name: str, tiny_engine: LoadTiny) -> None:
    check_room_is_kept(name, tiny_engine)


@pytest.mark.parametrize("name", EVERY)
def test_bad_tokens_and_batches_are_refused_and_change_nothing(name: str, tiny_engine: LoadTiny) -> None:
    check_bad_tokens_and_batches_are_refused_and_change_nothing(name, tiny_engine)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_a_chunk_that_fails_half_way_breaks_its_sequence_only(
    architecture: str, name: str, tiny_engine: LoadTiny
) -> None:
    check_a_chunk_that_fails_half_way_breaks_its_sequence_only(architecture, name, tiny_engine)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_rollback_to_the_last_committed_chunk(architecture: str, name: str, tiny_engine: LoadTiny) -> None:
    check_rollback_to_the_last_committed_chunk(architecture, name, tiny_engine)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_a_second_turn_after_decoding_in_a_batch(architecture: str, name: str, tiny_engine: LoadTiny) -> None:
    check_a_second_turn_after_decoding_in_a_batch(architecture, name, tiny_engine)


EMBEDDED_PROMPTS = (
    ("What is the capital of France?", "torch", "mlx"),
    ("Write a Python function that returns the n-th Fibonacci number.", "mlx", "torch"),
    ("A train travels 120 km in 2 hours, then 45 km in 30 minutes. What is its average speed?", "torch", "mlx"),
)


@pytest.mark.parametrize(("question", "source", "target"), EMBEDDED_PROMPTS)
def test_embedded_model(
    question: str, source: str, target: str, smollm2: ModelFiles, smollm2_engine: LoadSmollm2
) -> None:
    reading, writing = smollm2_engine(source), smollm2_engine(target)
    prompt = smollm2.tokenizer.encode_chat([{"role": "user", "content": question}])
    slices, logits = read_prompt(reading, prompt, 20)
    before = writing.counters.prompt_tokens
    tokens = write_answer(writing, receive(writing, slices, len(prompt)), logits, 24)
    assert writing.counters.prompt_tokens == before
    assert tokens == alone(writing, prompt, 24)
    assert tokens == alone(reading, prompt, 24)
