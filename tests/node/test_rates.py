"""The rate meter: buckets by size, recent samples, and no outlier moves it."""

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


def test_recent_samples_are_the_estimate() -> None:
    rates = RateMeter()
    for speed, samples in ((100, 500), (50, 3)):
        for _ in range(samples):
            rates.record(8, speed, 1.0)
    assert rates.estimate(8) == 50, "a lasting change is followed after three samples"


@pytest.mark.parametrize("factor", [20.0, 1 / 20])
@pytest.mark.parametrize("before", [2, 3, 5, 50])
def test_one_outlier_does_not_move_the_estimate(before: int, factor: float) -> None:
    rates = RateMeter()
    spread = [0.96, 1.04, 1.0, 0.98, 1.02]
    for index in range(before):
        rates.record(1000, 1000, 4.0 * spread[index % 5])
    rates.record(1000, 1000, 4.0 * factor)
    assert rates.estimate(1000) == pytest.approx(250, rel=0.05)
    for index in range(3):
        rates.record(1000, 1000, 4.0 * spread[index])
        assert rates.estimate(1000) == pytest.approx(250, rel=0.05), "nor later"


def test_a_slow_outlier_after_the_measurement_at_the_start() -> None:
    rates = RateMeter()
    rates.record(512, 512, 2.0)
    rates.record(1000, 1000, 80.0)
    assert rates.estimate(1000) == 256, "one of two samples: the faster counts"


@pytest.mark.parametrize("factor", [20.0, 1 / 20])
def test_a_lasting_change_is_followed_within_three_prompts(factor: float) -> None:
    rates = RateMeter()
    for _ in range(50):
        rates.record(1000, 1000, 4.0)
    for _ in range(3):
        rates.record(1000, 1000, 4.0 * factor)
    assert rates.estimate(1000) == pytest.approx(250 / factor)


def test_short_steps_are_judged_over_a_second() -> None:
    """A few slow decode steps in a row, as beside another process, are no change."""
    rates = RateMeter()
    for _ in range(200):
        rates.record(1, 1, 0.01)
    for _ in range(10):
        rates.record(1, 1, 0.05)
    assert rates.estimate(1) == pytest.approx(100)
    for _ in range(20):
        rates.record(1, 1, 0.05)
    assert rates.estimate(1) == pytest.approx(20), "a second of them is"


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


def test_an_interruption_does_not_count() -> None:
    rates = RateMeter()
    for _ in range(20):
        rates.record(1, 1, 0.01)
    rates.record(1, 1, 3600.0)
    assert rates.estimate(1) == pytest.approx(100)


def test_an_interruption_of_the_first_sample_of_a_size() -> None:
    rates = RateMeter()
    rates.record(64, 64, 0.01)
    rates.record(2048, 2048, 3600.0)
    assert rates.estimate(2048) == pytest.approx(3200), "limited to half of the next size"
    rates.record(2048, 2048, 0.4)
    assert rates.estimate(2048) == pytest.approx(5120)


def test_much_slower_small_work_is_measured_soon() -> None:
    rates = RateMeter()
    rates.record(64, 6400, 1.0)
    rates.record(1, 1, 0.1)
    assert rates.estimate(1) == 50, "one token takes no longer than 64, with a factor of two"
    for _ in range(2):
        rates.record(1, 1, 0.1)
    assert rates.estimate(1) == 10
    assert rates.estimate(64) == 6400
