"""The rate meter: buckets by size, and recent samples count more."""

import math
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disaggregated_inference.node.rates import RateMeter


def test_nothing_is_known_at_first() -> None:
    assert RateMeter().stats() == []
    assert RateMeter().estimate(5) is None


def test_buckets_are_powers_of_two() -> None:
    rates = RateMeter()
    for size in (1, 2, 3, 4, 7, 8, 1000):
        rates.record(size, 10, 0.1)
    assert [(rate.size, rate.samples) for rate in rates.stats()] == [(1, 1), (2, 2), (4, 2), (8, 1), (512, 1)]
    assert all(rate.tokens_per_s == pytest.approx(100) for rate in rates.stats())


def test_every_second_has_the_same_weight() -> None:
    rates = RateMeter()
    rates.record(1, 100, 1.0)
    rates.record(1, 20, 1.0)
    assert rates.estimate(1) == pytest.approx(60, rel=0.05), "not the mean of 100 and 20"
    rates = RateMeter()
    rates.record(1, 100, 1.0)
    rates.record(1, 1, 0.001)
    assert rates.estimate(1) == pytest.approx(101, rel=0.02), "a short sample does not weigh as much as a long one"


def test_recent_samples_count_more() -> None:
    rates = RateMeter()
    for speed, samples in ((100, 500), (50, 32)):
        for _ in range(samples):
            rates.record(8, speed, 1.0)
    assert rates.estimate(8) == pytest.approx(75, rel=0.01), "after a half-life, half of the way"
    for _ in range(200):
        rates.record(8, 50, 1.0)
    assert rates.estimate(8) == pytest.approx(50, rel=0.02)


def test_the_nearest_size_is_the_estimate() -> None:
    rates = RateMeter()
    rates.record(4, 40, 1.0)
    rates.record(64, 640, 1.0)
    assert [rates.estimate(size) for size in (1, 5, 15, 16, 31, 32, 100, 1 << 60)] == [
        40,
        40,
        40,
        40,
        40,
        640,
        640,
        640,
    ]


@pytest.mark.parametrize("wrong", [(0, 1.0), (5, 0.0), (5, -1.0), (5, math.inf), (5, math.nan)])
def test_invalid_samples_are_ignored(wrong: tuple[int, float]) -> None:
    rates = RateMeter()
    rates.record(1, *wrong)
    assert rates.stats() == []


@given(st.lists(st.tuples(st.integers(-5, 1 << 70), st.integers(1, 10**6), st.floats(1e-6, 1e3)), max_size=60))
def test_bounded_and_within_what_was_measured(notes: list[tuple[int, int, float]]) -> None:
    rates = RateMeter()
    for size, tokens, seconds in notes:
        rates.record(size, tokens, seconds)
    seen = rates.stats()
    assert len(seen) <= 32
    assert sum(rate.samples for rate in seen) == len(notes)
    speeds = [tokens / seconds for _, tokens, seconds in notes]
    assert all(min(speeds) * 0.999 <= rate.tokens_per_s <= max(speeds) * 1.001 for rate in seen)


def test_from_many_threads() -> None:
    rates = RateMeter()

    def work() -> None:
        for size in range(1, 2001):
            rates.record(size, 10, 0.1)
            rates.estimate(size)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(rate.samples for rate in rates.stats()) == 8000


def test_an_interruption_does_not_count_in_full() -> None:
    rates = RateMeter()
    for _ in range(20):
        rates.record(1, 1, 0.01)
    rates.record(1, 1, 3600.0)
    assert 50 < (rates.estimate(1) or 0) < 100
    for _ in range(40):
        rates.record(1, 1, 1.0)
    assert (rates.estimate(1) or 0) < 2, "constant slowness counts in full"


def test_an_interruption_of_the_first_sample_of_a_size() -> None:
    rates = RateMeter()
    rates.record(64, 64, 0.01)
    rates.record(2048, 2048, 3600.0)
    assert rates.estimate(2048) == pytest.approx(800), "limited to an eighth of the next size"
    for _ in range(20):
        rates.record(2048, 2048, 0.4)
    assert rates.estimate(2048) == pytest.approx(4600, rel=0.1)


def test_much_slower_small_work_is_measured_soon() -> None:
    rates = RateMeter()
    rates.record(64, 6400, 1.0)
    for _ in range(4):
        rates.record(1, 1, 0.1)
    assert 10 < (rates.estimate(1) or 0) < 30
    assert rates.estimate(64) == 6400
