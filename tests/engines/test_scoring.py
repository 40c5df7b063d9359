"""Prompt logprobs of every engine, beside those of transformers."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from disaggregated_inference.engines import Engine, Scoring, chunk_scoring, load_engine
from disaggregated_inference.errors import PromptLogprobsUnsupported, SequenceBroken, TokensRefused
from disaggregated_inference.kv import LogprobRows, reusable_tokens
from disaggregated_inference.models import ModelStore
from tests.support.engines import ENGINE_OPTIONS, LLAMACPP, LoadTiny
from tests.support.handoff import alone, prompt_of
from tests.support.prompt_logprobs import TOLERANCE, transformers_logprobs

VOCABULARY = 512


def score(engine: Engine, prompt: list[int], chunk: int, alternatives: int, rows: int = 10) -> list[LogprobRows]:
    """`rows`: of logits in memory at a time."""
    found: list[LogprobRows] = []
    sequence = engine.open(len(prompt) + 1)
    for at in range(0, len(prompt), chunk):
        part = prompt[at : at + chunk]
        following = prompt[at + 1 : at + 1 + chunk]
        engine.prefill(
            sequence,
            part,
            scoring=Scoring(following, alternatives, found.append, 4 * rows * engine.spec.vocabulary),
        )
    assert sequence.computed == len(prompt)
    engine.close(sequence)
    return found


def joined(pieces: list[LogprobRows]) -> tuple[NDArray[np.float32], NDArray[np.uint32], NDArray[np.float32]]:
    at = 1
    for piece in pieces:
        assert piece.start == at, "in order, without a gap"
        at = piece.stop
    columns = zip(*((piece.logprobs, piece.top_tokens, piece.top_logprobs) for piece in pieces), strict=True)
    logprobs, tokens, top = (np.concatenate(column) for column in columns)
    return logprobs, tokens, top


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
@pytest.mark.parametrize("name", [*ENGINE_OPTIONS, *LLAMACPP])
def test_logprobs_equal_those_of_transformers(
    name: str, architecture: str, tiny_engine: LoadTiny, tiny_folder: Callable[[str], Path]
) -> None:
    """For llama.cpp within what half precision allows."""
    engine, prompt = tiny_engine(name, architecture), prompt_of(200)
    twin, tolerance = ("twin_", 0.05) if name == "llamacpp" else ("", TOLERANCE)
    expected = transformers_logprobs(tiny_folder(twin + architecture), prompt)
    own = expected[np.arange(199), prompt[1:]]
    before = engine.counters.prompt_tokens
    for chunk in (200, 77, 64, 1):
        logprobs, tokens, top = joined(score(engine, prompt, chunk, 3))
        np.testing.assert_allclose(logprobs, own, atol=tolerance)
        np.testing.assert_allclose(top, np.sort(expected)[:, ::-1][:, :3], atol=tolerance)
        np.testing.assert_allclose(top, np.take_along_axis(expected, tokens.astype(int), 1), atol=tolerance)
    assert engine.counters.prompt_tokens - before == 4 * 200, "each token once"
    assert alone(engine, prompt, 4) == alone(engine, prompt, 4, chunk=50), "the engine goes on as before"


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ENGINE_OPTIONS, *LLAMACPP])
def test_scoring_changes_neither_kv_nor_logits(name: str, tiny_engine: LoadTiny) -> None:
    engine, prompt = tiny_engine(name, "llama"), prompt_of(100)
    sequence = engine.open(120)
    slices: list[int] = []
    pieces: list[LogprobRows] = []
    logits = engine.prefill(
        sequence, prompt, lambda piece: slices.append(piece.layer), Scoring(prompt[1:], 0, pieces.append)
    )
    assert slices == [0, 1, 2, 3]
    assert joined(pieces)[1].shape == (99, 0), "no alternatives"
    tokens = logits.greedy().tolist()
    for _ in range(5):
        tokens += engine.step([sequence], tokens[-1:]).greedy().tolist()
    engine.close(sequence)
    assert tokens == alone(engine, prompt, 6)


@pytest.fixture(scope="module")
def simulated() -> Engine:
    return load_engine("simulated", ModelStore().resolve("simulated:tiny"))


def test_the_simulated_engine_scores_by_its_own_logits(simulated: Engine) -> None:
    prompt = prompt_of(30, 900)
    logprobs, tokens, top = joined(score(simulated, prompt, 7, 2, rows=3))
    sequence = simulated.open(30)
    for at, token in enumerate(prompt[:-1]):
        row = simulated.prefill(sequence, [token]).numpy()[0].astype(np.float64)
        row -= np.log(np.exp(row).sum())
        assert logprobs[at] == pytest.approx(row[prompt[at + 1]], abs=1e-4)
        assert top[at].tolist() == pytest.approx(np.sort(row)[::-1][:2].tolist(), abs=1e-4)
        assert tokens[at][0] == row.argmax()
    simulated.close(sequence)


def test_wrong_targets_are_refused_and_change_nothing(simulated: Engine) -> None:
    sequence = simulated.open(10)
    for targets, why in (([5], "1 tokens to score after a chunk of 3"), ([5, 6, 10**6], "not in the vocabulary")):
        with pytest.raises(TokensRefused, match=why):
            simulated.prefill(sequence, [1, 2, 3], scoring=Scoring(targets, 0, lambda rows: None))
    assert (sequence.length, sequence.broken) == (0, False)
    simulated.close(sequence)


def test_an_engine_that_cannot_says_so(simulated: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(simulated), "prompt_logprobs", False)
    sequence = simulated.open(10)
    with pytest.raises(PromptLogprobsUnsupported, match="the engine simulated computes no prompt logprobs: leave out"):
        simulated.prefill(sequence, [1, 2, 3], scoring=Scoring([2, 3], 0, lambda rows: None))
    simulated.close(sequence)


def test_logits_that_are_not_numbers(simulated: Engine) -> None:
    found: list[LogprobRows] = []
    scoring = Scoring([0, 1], 1, found.append)
    with pytest.raises(SequenceBroken, match="are not numbers"):
        scoring.take_logits(1, np.full((2, 4), np.nan, np.float32), slice(0, 2))
    assert not found
    scoring.take_logits(1, np.array([[-np.inf, 0, 0, 0], [0, 9, 0, 0]], np.float32), slice(0, 2))
    assert found[0].logprobs[0] == -9999, "JSON has no infinity"


def test_the_logits_of_a_whole_chunk_are_never_in_memory() -> None:
    scoring = Scoring(range(8192), 1, lambda rows: None)
    pieces = list(scoring.pieces(150_000))
    assert [at for piece in pieces for at in range(8192)[piece]] == list(range(8192))
    assert max(piece.stop - piece.start for piece in pieces) * 150_000 * 4 <= 64 << 20


def test_which_chunks_are_scored() -> None:
    prompt = list(range(10))

    def targets(at: int, count: int, scored: int) -> list[int] | None:
        found = chunk_scoring(prompt, at, count, scored, 1, lambda rows: None)
        return None if found is None else list(found.targets)

    assert targets(0, 4, 0) == [1, 2, 3, 4]
    assert targets(8, 2, 0) == [9], "what follows the prompt is not known"
    assert targets(0, 4, 5) is None
    assert targets(0, 4, 4) == [1, 2, 3, 4]
    assert [reusable_tokens(10, scored) for scored in (None, 0, 1, 5, 10)] == [9, 0, 0, 4, 9]
