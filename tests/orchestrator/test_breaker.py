"""The breaker: what opens a circuit, what closes it, and how a node that came back is warmed up."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disaggregated_inference.client import DisaggregatedClient
from disaggregated_inference.orchestrator.breaker import Breaker
from disaggregated_inference.timeouts import BreakerTimeouts, OrchestratorTimeouts
from tests.support.cluster import Process, config_of
from tests.support.orchestrator_cluster import answered
from tests.support.waiting import until

MODEL = "simulated:tiny"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def state(breaker: Breaker) -> str:
    """Anew every time, also for the type checker, who takes a property for a constant."""
    return breaker.state


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(clock)


def test_closed_at_first(breaker: Breaker) -> None:
    assert (state(breaker), breaker.retry_at, breaker.reason) == ("closed", None, "")
    assert all(breaker.allows() for _ in range(5))
    assert breaker.warmth() == 1.0


def test_one_hard_failure_opens(breaker: Breaker, clock: Clock) -> None:
    breaker.failed("connection refused", hard=True)
    assert (state(breaker), breaker.retry_at, breaker.reason) == ("open", 100.5, "connection refused")
    assert not breaker.allows()
    clock.now = 100.49
    assert not breaker.allows()


def test_three_soft_failures_open(breaker: Breaker, clock: Clock) -> None:
    for _ in range(2):
        breaker.failed("500")
        assert state(breaker) == "closed"
    clock.now += 30
    breaker.failed("500")
    assert state(breaker) == "open"


def test_soft_failures_are_forgotten(breaker: Breaker, clock: Clock) -> None:
    for _ in range(10):
        breaker.failed("500")
        clock.now += 15.1
        assert state(breaker) == "closed", "never three within 30 s"
    breaker.failed("500")
    breaker.failed("500")
    assert state(breaker) == "open"


def test_soft_failures_before_an_opening_do_not_count_after_it(breaker: Breaker, clock: Clock) -> None:
    breaker.failed("500")
    breaker.failed("500")
    breaker.failed("reset", hard=True)
    clock.now += 0.5
    breaker.succeeded()
    breaker.failed("500")
    assert state(breaker) == "closed"


def test_half_open_lets_one_through_at_a_time(breaker: Breaker, clock: Clock) -> None:
    breaker.failed("reset", hard=True)
    clock.now += 0.5
    assert state(breaker) == "half_open"
    assert [breaker.allows() for _ in range(3)] == [True, False, False]
    assert not breaker.ready
    breaker.succeeded()
    assert state(breaker) == "closed"
    assert [breaker.allows() for _ in range(3)] == [True, True, True]
    assert breaker.reason == ""


def test_ready_takes_no_probe(breaker: Breaker, clock: Clock) -> None:
    breaker.failed("reset", hard=True)
    seen = [breaker.ready]
    clock.now += 0.5
    seen += [breaker.ready, breaker.ready]
    assert seen == [False, True, True]
    assert breaker.allows()


def test_a_probe_that_never_reports_is_given_up(breaker: Breaker, clock: Clock) -> None:
    breaker.failed("reset", hard=True)
    clock.now += 0.5
    assert breaker.allows()
    clock.now += 9.9
    assert not breaker.allows()
    clock.now += 0.1
    assert breaker.allows()


def test_open_time_doubles_up_to_a_limit_and_starts_over(breaker: Breaker, clock: Clock) -> None:
    breaker.failed("refused", hard=True)
    waits = []
    for _ in range(7):
        assert breaker.retry_at is not None
        waits.append(breaker.retry_at - clock.now)
        clock.now = breaker.retry_at
        assert breaker.allows()
        breaker.failed("refused", hard=True)
    assert waits == [0.5, 1, 2, 4, 8, 10, 10]
    clock.now += 10
    assert breaker.allows()
    breaker.succeeded()
    breaker.failed("refused", hard=True)
    assert breaker.retry_at == clock.now + 0.5


def test_a_soft_failure_of_the_probe_opens_again(breaker: Breaker, clock: Clock) -> None:
    breaker.failed("refused", hard=True)
    clock.now += 0.5
    assert breaker.allows()
    breaker.failed("503")
    assert (state(breaker), breaker.retry_at) == ("open", clock.now + 1)


def test_failures_at_the_same_time_count_once(breaker: Breaker) -> None:
    for _ in range(20):
        breaker.failed("reset", hard=True)
    assert breaker.retry_at == 100.5


def test_a_response_from_before_the_failure_does_not_close(breaker: Breaker, clock: Clock) -> None:
    breaker.failed("frozen", hard=True)
    breaker.succeeded()
    assert state(breaker) == "open"
    assert breaker.reason == "frozen"
    clock.now += 0.5
    breaker.succeeded()
    assert state(breaker) == "closed"


def test_warmth_rises_after_closing(breaker: Breaker, clock: Clock) -> None:
    breaker.failed("reset", hard=True)
    clock.now += 0.5
    breaker.succeeded()
    seen = []
    for _ in range(4):
        seen.append(breaker.warmth())
        clock.now += 5
    assert seen == pytest.approx([0.2, 0.6, 1.0, 1.0])


def test_success_after_success_stays_warm(breaker: Breaker, clock: Clock) -> None:
    breaker.failed("reset", hard=True)
    clock.now += 0.5
    breaker.succeeded()
    clock.now += 10
    breaker.succeeded()
    assert breaker.warmth() == 1.0


def test_a_new_epoch_starts_cold_without_failures(breaker: Breaker) -> None:
    breaker.failed("500")
    breaker.failed("500")
    breaker.renewed()
    assert breaker.warmth() == pytest.approx(0.2)
    breaker.failed("500")
    assert state(breaker) == "closed"


def test_a_new_epoch_is_tried_at_once_but_by_one(breaker: Breaker, clock: Clock) -> None:
    for _ in range(3):
        breaker.failed("refused", hard=True)
        clock.now = breaker.retry_at or 0
    breaker.failed("refused", hard=True)
    assert state(breaker) == "open"
    breaker.renewed()
    assert [breaker.allows() for _ in range(2)] == [True, False]
    breaker.failed("refused", hard=True)
    assert breaker.retry_at == clock.now + 8, "a process that keeps restarting waits longer every time"


def test_limits_are_settings(clock: Clock) -> None:
    breaker = Breaker(clock, soft_failures=1, timeouts=BreakerTimeouts(first_open_s=2, longest_open_s=3, warm_s=1))
    breaker.failed("500")
    assert breaker.retry_at == 102
    clock.now = 102
    breaker.failed("500")
    assert breaker.retry_at == 105
    clock.now = 105
    breaker.succeeded()
    clock.now = 105.5
    assert breaker.warmth() == pytest.approx(0.6)


@given(st.lists(st.sampled_from(["hard", "soft", "good", "ask", "renewed", "wait", "long"]), max_size=60))
def test_a_breaker_always_half_opens_again(steps: list[str]) -> None:
    clock = Clock()
    breaker = Breaker(clock)
    for step in steps:
        if step in ("hard", "soft"):
            breaker.failed(step, hard=step == "hard")
        elif step == "good":
            breaker.succeeded()
        elif step == "ask":
            expected = breaker.ready
            assert breaker.allows() == expected
            assert state(breaker) != "half_open" or not breaker.allows(), "one probe at a time"
        elif step == "renewed":
            breaker.renewed()
        else:
            clock.now += 0.7 if step == "wait" else 25
        assert breaker.retry_at is None or breaker.retry_at <= clock.now + 10
        assert 0.2 <= breaker.warmth() <= 1
    clock.now += 20
    assert breaker.allows()
    breaker.succeeded()
    assert state(breaker) == "closed"


@pytest.mark.slow
def test_a_half_open_prefill_node_is_tried_and_used_again() -> None:
    """It freezes while it reads and comes back as the same process: only its trial closes the breaker. The trial is a
    whole request; another one of that moment does without the node."""
    long = OrchestratorTimeouts(breaker=BreakerTimeouts(first_open_s=2.0, longest_open_s=2.0))
    reader, writer = (
        Process(name, role, "simulated", MODEL, "--profile", f"custom:prefill={speed},decode=500")
        for name, role, speed in (("p", "prefill", 500), ("d", "decode", 20_000))
    )
    short, prompt = [2] * 100, [3] * 2000  # which the prefill node reads for four seconds
    try:
        for node in (reader, writer):
            node.ready()
        with DisaggregatedClient(config_of(writer, local="always")) as alone:
            right, right_short = (answered(alone, tokens, 4, model=MODEL)[0] for tokens in (prompt, short))
        with DisaggregatedClient(config_of(reader, writer, poll_s=0.2), long) as client, ThreadPoolExecutor(2) as pool:

            def breaker() -> str:
                return str(client.status()["nodes"][0]["breaker"])

            assert until(lambda: client.health()["verdict"] == "all up")
            struck = pool.submit(answered, client, prompt, 4, model=MODEL)
            assert until(lambda: reader.status()["waiting"] or struck.done())
            reader.freeze()
            assert until(lambda: breaker() == "open" or struck.done(), 60)
            reader.thaw()
            tokens, metrics = struck.result(60)
            assert (tokens, {failover["node"] for failover in metrics["failovers"]}) == (right, {"p"})
            assert until(lambda: breaker() == "half_open")
            both = [pool.submit(answered, client, short, 4, model=MODEL) for _ in range(2)]
            answers = [each.result(60) for each in both]
            assert [tokens for tokens, _ in answers] == [right_short] * 2
            assert "p" in [metrics["prefill_node"] for _, metrics in answers]
            assert breaker() == "closed"
            assert answered(client, short, 4, model=MODEL)[1]["prefill_node"] == "p"
            assert until(lambda: reader.nothing_left() and writer.nothing_left())
    finally:
        for node in (reader, writer):
            node.end()
