"""Seconds in which KV arrived: waiting counts nothing, several connections at once count once."""

from contextlib import suppress

import pytest

from disaggregated_inference.kv_transfer.wire_time import Arrivals


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_only_the_time_in_which_slices_arrive_counts() -> None:
    clock = Clock()
    arrivals = Arrivals(clock)
    assert (arrivals.began_at, arrivals.seconds()) == (None, 0.0)
    clock.now = 5.0  # the prefill node computes
    with arrivals.one():
        clock.now = 6.0
        with arrivals.one():  # on another connection
            clock.now = 7.0
    clock.now = 20.0
    with arrivals.one():
        clock.now = 21.5
    assert arrivals.began_at == 5.0
    assert arrivals.seconds() == pytest.approx(2.0 + 1.5)
    assert arrivals.seconds(until=20.5) == pytest.approx(2.0 + 0.5), "hidden: before the end of the prefill"
    assert arrivals.seconds(until=1.0) == 0.0


def test_a_connection_that_breaks_counts_until_then() -> None:
    clock = Clock()
    arrivals = Arrivals(clock)
    with suppress(OSError), arrivals.one():
        clock.now = 2.0
        raise OSError("broken")
    clock.now = 9.0
    assert arrivals.seconds() == 2.0
