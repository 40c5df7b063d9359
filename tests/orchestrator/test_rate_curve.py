"""Predicted prefill times: between the lengths that a node measured, beyond them, and with bad readings among them."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disaggregated_inference.api import Rate
from disaggregated_inference.node.rates import RateMeter
from disaggregated_inference.orchestrator.cluster_view import ClusterView, NodeView, RouteRequest
from disaggregated_inference.orchestrator.rate_curve import prefill_seconds
from disaggregated_inference.orchestrator.router import plan

_LENGTHS = (16, 40, 90, 200, 450, 1000, 2000, 3000, 6000, 12_000, 30_000)

# Seconds of a prompt: a fixed part, the multiplications, attention.
_MACHINES: dict[str, Callable[[int], float]] = {
    "a CPU": lambda tokens: 0.01 + tokens / 600 + (tokens / 4000) ** 2,
    "a GPU that reads its weights for short prompts": lambda tokens: 0.09 + tokens / 5000 + (tokens / 40_000) ** 2,
    "a tiny model, attention is most of it": lambda tokens: 0.002 + tokens / 100_000 + (tokens / 6000) ** 2,
    "nothing but multiplications": lambda tokens: tokens / 1000,
}


def predicted_s(meter: RateMeter, tokens: int) -> float:
    """What the orchestrator tells as `predicted_first_token_time`, for a node that prefills alone."""
    node = NodeView(name="n", role="decode", prefill_rates=tuple(meter.stats()))
    return plan(RouteRequest(model="m", prompt_tokens=tokens), ClusterView(nodes=(node,))).first_token_s


def served(machine: Callable[[int], float], lengths: tuple[int, ...], *, bad: float = 1.0) -> RateMeter:
    """Five requests of each length; of those of each length, one takes `bad` times as long."""
    meter = RateMeter()
    for length in (64, 512):  # at its start
        meter.record(length, length, machine(length))
    for number in range(5):
        for length in lengths:
            meter.record(length, length, machine(length) * (bad if number == 2 else 1.0))
    return meter


@pytest.mark.parametrize("name", _MACHINES)
@pytest.mark.parametrize("bad", [1.0, 20.0])
def test_predictions_are_within_10_percent(name: str, bad: float) -> None:
    """Of lengths that were served; also where one reading of each is twenty times too slow."""
    machine = _MACHINES[name]
    meter = served(machine, _LENGTHS, bad=bad)
    for tokens in _LENGTHS:
        assert predicted_s(meter, tokens) == pytest.approx(machine(tokens), rel=0.1), tokens


@pytest.mark.parametrize("name", _MACHINES)
def test_predictions_of_other_lengths_are_within_15_percent(name: str) -> None:
    """Between the lengths that were served, and to twice the longest."""
    machine = _MACHINES[name]
    meter = served(machine, _LENGTHS)
    for tokens in (25, 60, 130, 400, 1500, 2047, 2048, 4000, 9000, 20_000, 60_000):
        assert predicted_s(meter, tokens) == pytest.approx(machine(tokens), rel=0.15), tokens


def test_the_edge_of_a_bucket_is_no_step() -> None:
    """Rates are kept in powers of two; the prediction does not jump between them."""
    machine = _MACHINES["a tiny model, attention is most of it"]
    meter = served(machine, (1100, 2000, 2100, 4000))
    assert predicted_s(meter, 2048) / predicted_s(meter, 2047) == pytest.approx(1.0, rel=0.01)


def test_few_tokens_take_as_long_as_some_where_that_was_measured() -> None:
    """A machine that reads its weights once for 64 tokens reads them once for 4."""
    rates = (Rate(size=64, tokens_per_s=640.0), Rate(size=512, tokens_per_s=5120.0))
    assert prefill_seconds(rates, 4) == pytest.approx(0.1)
    assert prefill_seconds(rates, 0) == pytest.approx(0.1)


def test_one_length_is_a_rate() -> None:
    rates = (Rate(size=512, tokens_per_s=1000.0, measured_size=800),)
    assert [prefill_seconds(rates, tokens) for tokens in (80, 800, 8000)] == [pytest.approx(x) for x in (0.08, 0.8, 8)]


@pytest.mark.parametrize("rates", [(), (Rate(size=64, tokens_per_s=0.0),)])
def test_nothing_is_measured(rates: tuple[Rate, ...]) -> None:
    assert prefill_seconds(rates, 100) is None


def test_one_bad_reading_of_a_new_length_does_not_make_long_prompts_look_endless() -> None:
    """The slope beyond the longest rests on three readings at least. Twice: what a meter lets a first reading do."""
    meter = served(lambda tokens: tokens / 1000, ())
    meter.record(2000, 2000, 400.0)
    assert predicted_s(meter, 64_000) == pytest.approx(2 * 64)


def test_a_bad_short_reading_does_not_move_long_prompts() -> None:
    rates = (Rate(size=64, tokens_per_s=1.0), Rate(size=512, tokens_per_s=1000.0))
    assert prefill_seconds(rates, 512) == pytest.approx(0.512)
    assert prefill_seconds(rates, 100) == pytest.approx(0.512), "at most as long as the longer one"


@given(
    st.lists(
        st.tuples(st.integers(0, 10**6), st.floats(0.01, 1e9), st.integers(0, 9), st.integers(0, 10**6)), max_size=6
    ),
    st.integers(0, 10**7),
)
def test_any_rates_give_a_finite_time(found: list[tuple[int, float, int, int]], tokens: int) -> None:
    rates = [Rate(size=a, tokens_per_s=b, samples=c, measured_size=d) for a, b, c, d in found]
    seconds = prefill_seconds(rates, tokens)
    assert (seconds is None) == (not rates)
    assert seconds is None or (math.isfinite(seconds) and seconds > 0)
    longer = prefill_seconds(rates, tokens + 1000)
    assert longer is None or seconds is None or longer >= seconds * 0.999, "a longer prompt is never said to be faster"
