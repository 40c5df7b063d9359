"""Sampling: each parameter alone, and seeds."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from numpy.typing import NDArray

from disaggregated_inference.api import SamplingParams, convert
from disaggregated_inference.errors import BadRequest, SequenceBroken
from disaggregated_inference.node.sampler import SampledToken, Sampler

ROW = np.array([0.0, 4.0, 3.0, 2.0, -1.0], np.float32)
EOS = (1,)


def choose(
    row: NDArray[np.float32] = ROW, prompt: tuple[int, ...] = (), written: tuple[int, ...] = (), **asked: Any
) -> int:
    return Sampler(SamplingParams(**asked), prompt, EOS, written=written).choose(row).token


def drawn(count: int = 400, **asked: Any) -> list[int]:
    """The tokens of `count` different seeds."""
    return [choose(seed=seed, **{"temperature": 1.0, **asked}) for seed in range(count)]


def test_greedy_by_default() -> None:
    assert choose() == 1
    assert SamplingParams().greedy
    assert not SamplingParams(temperature=0.5).greedy
    assert not SamplingParams(logit_bias={1: 1.0}).greedy
    assert not SamplingParams(min_tokens=1).greedy
    assert SamplingParams(ignore_eos=True).greedy, "then an end token is like any other token"


def test_the_distribution_is_the_softmax() -> None:
    tokens = drawn(4000)
    shares = np.exp(ROW) / np.exp(ROW).sum()
    found = np.bincount(tokens, minlength=5) / 4000
    assert np.abs(found - shares).max() < 0.03


def test_temperature_sharpens_and_flattens() -> None:
    cold, warm = (drawn(temperature=t).count(1) for t in (0.2, 5.0))
    assert cold > 390
    assert warm < 200


def test_top_k_top_p_min_p() -> None:
    assert set(drawn(top_k=1)) == {1}
    assert set(drawn(top_k=2)) == {1, 2}
    assert set(drawn(top_p=0.5)) == {1}
    assert set(drawn(top_p=0.85)) == {1, 2}
    assert set(drawn(min_p=0.3)) == {1, 2}
    assert set(drawn(top_p=0.0)) == {1}


def test_penalties() -> None:
    assert choose(prompt=(1,), repetition_penalty=2.0) == 2
    assert choose(written=(1,), repetition_penalty=2.0) == 2
    assert choose(np.array([-1.0, -0.9], np.float32), prompt=(1,), repetition_penalty=2.0) == 0
    assert choose(prompt=(1,), presence_penalty=1.5) == 1, "presence_penalty ignores the prompt"
    assert choose(written=(1,), presence_penalty=1.5) == 2
    assert choose(written=(1,), frequency_penalty=0.8) == 1
    assert choose(written=(1, 1), frequency_penalty=0.8) == 2


def test_bias_and_masks() -> None:
    assert choose(logit_bias={4: 100.0}) == 4
    assert choose(logit_bias={1: -100.0}) == 2
    assert choose(ignore_eos=True) == 1
    assert choose(min_tokens=2, written=(3,)) == 2
    assert choose(min_tokens=1, written=(3,)) == 1
    sampler = Sampler(SamplingParams(), [], EOS)
    assert sampler.choose(ROW, np.array([True, False, False, True, True])).token == 3


def test_no_token_left_and_nan_logits() -> None:
    none = np.zeros(5, np.bool_)
    for temperature in (0.0, 1.0):
        sampler = Sampler(SamplingParams(temperature=temperature, min_tokens=1), [], EOS)
        with pytest.raises(BadRequest, match="no token is allowed next"):
            sampler.choose(ROW, none | (np.arange(5) == EOS[0]))
        with pytest.raises(SequenceBroken, match="not numbers"):
            sampler.choose(np.array([0.0, 1.0, np.nan], np.float32))


def test_the_logits_are_not_changed() -> None:
    row = ROW.copy()
    choose(row, prompt=(1,), written=(2,), repetition_penalty=2.0, presence_penalty=1.0, logit_bias={0: 3.0})
    assert (row == ROW).all()


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0])
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"top_k": 50},
        {"top_p": 0.3},
        {"top_p": 0.95},
        {"min_p": 0.05},
        {"top_k": 3000, "top_p": 0.9, "min_p": 0.01},
        {"top_p": 0.9, "temperature": 0.3},
        {"top_k": 40, "temperature": 1e-9},
    ],
    ids=str,
)
def test_large_rows_match_a_full_sort(scale: float, asked: dict[str, Any]) -> None:
    """Compared with the plain definition, for peaked and for flat rows."""
    rules = SamplingParams(**{"temperature": 1.0, **asked})
    row = (np.random.default_rng(3).standard_normal(20_000) * scale).astype(np.float32)
    row[500:900] = -np.inf
    shares = reference(row, rules)
    found = [Sampler(replace(rules, seed=seed), [], ()).choose(row).token for seed in range(300)]
    spared = reference(row, rules, spare=1)  # rounding may include one token more
    assert all(spared[token] > 0 for token in found)
    likely = np.flatnonzero(shares >= np.sort(shares)[-20])
    assert abs(np.isin(found, likely).mean() - shares[likely].sum()) < 0.1
    assert abs((np.array(found) < 10_000).mean() - shares[:10_000].sum()) < 0.12


def test_equal_tokens_are_kept_from_the_first() -> None:
    flat = np.zeros(2000, np.float32)
    for asked, kept in (({"top_p": 0.5}, 1000), ({"top_p": 0.05}, 100), ({"top_k": 700}, 700)):
        tokens = drawn(300, row=flat, **asked)
        assert kept * 0.9 < max(tokens) < kept
        assert min(tokens) < kept * 0.1


def reference(row: NDArray[np.float32], rules: SamplingParams, spare: int = 0) -> NDArray[np.float64]:
    """Each token's probability, by sorting everything in float64."""
    order = np.argsort(-row, kind="stable")[: rules.top_k or None]
    weights = np.exp((row[order].astype(np.float64) - row.max()) / rules.temperature)
    shares = weights / weights.sum()
    shares[int(np.searchsorted(np.cumsum(shares), rules.top_p)) + 1 + spare :] = 0
    shares[shares < rules.min_p * shares[0] * 0.9999] = 0
    whole = np.zeros(len(row))
    whole[order] = shares / shares.sum()
    return whole


def test_logprobs() -> None:
    sampler = Sampler(SamplingParams(logprobs=2), [], EOS)
    chosen = sampler.choose(ROW)
    assert [top.token for top in chosen.top_logprobs] == [1, 2]
    assert chosen.logprob == chosen.top_logprobs[0].logprob
    assert np.isclose(np.exp(chosen.logprob or 0), (np.exp(ROW) / np.exp(ROW).sum())[1])
    assert Sampler(SamplingParams(logprobs=0), [], EOS).choose(ROW) == SampledToken(1, chosen.logprob)
    few = Sampler(SamplingParams(logprobs=5), [], EOS).choose(ROW, np.array([True, False, False, True, False]))
    assert [top.token for top in few.top_logprobs] == [3, 0], "a masked token has no logprob"


def test_draws_depend_on_seed_and_position_only() -> None:
    def answer(seed: int | None, choice: int = 0) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=2.0, seed=seed), [], EOS, choice)
        tokens = []
        for _ in range(30):
            tokens.append(sampler.choose(ROW).token)
            sampler.note(tokens[-1])
        return tokens

    assert answer(7) == answer(7)
    assert answer(7) != answer(8)
    assert answer(7) != answer(7, choice=1)
    assert answer(None) != answer(None)
    resumed = Sampler(SamplingParams(temperature=2.0, seed=7), [], EOS)
    for token in answer(7)[:10]:
        resumed.note(token)
    assert resumed.choose(ROW).token == answer(7)[10], "another node continues in the same way"
    begun = Sampler(SamplingParams(temperature=2.0, seed=7), [], EOS, written=answer(7)[:10])
    assert (begun.written, begun.choose(ROW).token) == (10, answer(7)[10])


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"frequency_penalty": 3},
        {"logprobs": 21},
        {"stop": ("",)},
        {"stop": ("x",) * 17},
        {"logit_bias": {5: 1.0}},
        {"logit_bias": {1: 1000.0}},
        {"seed": 1 << 64},
        {"min_tokens": -1},
    ],
    ids=str,
)
def test_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(BadRequest, match=next(iter(wrong))):
        convert(wrong, SamplingParams).require_vocabulary(5)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(-50, 50, width=32), min_size=2, max_size=40),
    st.floats(0.05, 5),
    st.floats(0, 1),
    st.integers(0, 5),
    st.floats(0, 1),
    st.integers(0, 2**64 - 1),
)
def test_always_a_token_that_is_allowed(
    row: list[float], temperature: float, top_p: float, top_k: int, min_p: float, seed: int
) -> None:
    asked = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
    token = Sampler(asked, [], ()).choose(np.array(row, np.float32)).token
    weights = np.exp((np.array(row, np.float32) - np.float32(max(row))) / np.float32(temperature))
    better = sum(weight > weights[token] for weight in weights)  # equal weights are equally likely
    assert not top_k or better < top_k


def test_rounding_moves_few_draws() -> None:
    """Another batch rounds otherwise. One random number into the cumulative sum, which hangs on the rounding of all
    tokens, chose another one in 2 of 10 draws here."""
    chance = np.random.default_rng(3)
    row = chance.normal(0, 3, 49152).astype(np.float32)
    other = row + chance.normal(0, 1e-3, len(row)).astype(np.float32)
    moved = 0
    for seed in range(400):
        rules = SamplingParams(temperature=1.0, seed=seed)
        moved += Sampler(rules, [], ()).choose(row).token != Sampler(rules, [], ()).choose(other).token
    assert moved <= 3


@pytest.mark.slow
@pytest.mark.parametrize("rules", [{}, {"top_k": 6}, {"top_p": 0.9}, {"min_p": 0.05}])
def test_draws_are_as_frequent_as_the_softmax_says(rules: dict[str, Any]) -> None:
    row = np.array([2.0, 1.5, 1.0, 0.0, -1.0, -2.0, -4.0, -np.inf], np.float32)
    weights = np.exp(row.astype(np.float64))
    ordered = np.argsort(-weights)
    share = weights / weights.sum()
    kept = {
        "top_k": ordered[: rules.get("top_k", 8)],
        "top_p": ordered[: int(np.searchsorted(np.cumsum(share[ordered]), 0.9)) + 1],
        "min_p": np.flatnonzero(weights >= 0.05 * weights.max()),
    }.get(next(iter(rules), ""), np.flatnonzero(weights > 0))
    expected = np.zeros(8)
    expected[kept] = weights[kept] / weights[kept].sum()
    count = 20_000
    sampler = Sampler(SamplingParams(temperature=1.0, seed=11, **rules), [], ())
    found = np.zeros(8)
    for _ in range(count):
        token = sampler.choose(row).token
        sampler.note(token)
        found[token] += 1
    assert not found[expected == 0].any()
    error = np.abs(found / count - expected)
    assert (error <= 5 * np.sqrt(expected * (1 - expected) / count) + 1e-9).all()
