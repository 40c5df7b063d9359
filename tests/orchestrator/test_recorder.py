"""What is told of a request that did not go straight: what was held, what was read, who failed and for how long."""

from typing import Any

import pytest

from disaggregated_inference.api import Failover, ReportedMetrics
from disaggregated_inference.cluster import Policies, Server
from disaggregated_inference.orchestrator.cluster_view import Route
from disaggregated_inference.orchestrator.recorder import Attempt, RequestRecorder

SERVERS = {
    name: Server(name=name, host=name, port=1, model="m", role="prefill" if name[0] == "p" else "decode")
    for name in ("p1", "p2", "d1", "d2")
}


class Clock:
    """That goes when it is told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def a_record(prompt_tokens: int, clock: Clock | None = None) -> RequestRecorder:
    record = RequestRecorder("r", "m", clock=clock or Clock())
    record.prompt_tokens = prompt_tokens
    return record


def begun(record: RequestRecorder, prefill: str | None, decode: str) -> Attempt:
    return record.begin(Route(decode=decode, prefill=prefill, first_token_s=0.0, total_s=0.0), "", "mlx")


def wrote(record: RequestRecorder, attempt: Attempt, at: float) -> None:
    attempt.first_token_at = attempt.last_at = at
    record.first_token(at)


def failed(record: RequestRecorder, attempt: Attempt, node: str) -> None:
    record.failed(Failover(node=node, code="unreachable", message=f"{node}: it does not answer"), attempt)


def told(record: RequestRecorder) -> dict[str, Any]:
    return record.finish(SERVERS, Policies()).metrics()


def test_blocks_of_a_failed_attempt_are_not_counted_as_cached(clock: Clock) -> None:
    """A new prompt of 200 tokens; the writer dies after 50: the reader holds the prompt, and reads what was written."""
    record = a_record(200, clock)
    first = begun(record, "p1", "d1")
    wrote(record, first, clock.now + 0.5)
    failed(record, first, "d1")
    second = begun(record, "p1", "d2")
    wrote(record, second, clock.now + 1.0)
    second.metrics = ReportedMetrics(prompt_tokens=250, prefill_cached_tokens=200, cached_tokens=0, prefill_time=0.5)
    metrics = told(record)
    assert (metrics["cached_tokens"], metrics["prefill_speed"]) == (0, 50 / 0.5)


def test_cached_tokens_of_another_prefill_node_are_counted_up_to_the_prompt(clock: Clock) -> None:
    record = a_record(200, clock)
    failed(record, begun(record, "p1", "d1"), "p1")
    second = begun(record, "p2", "d1")
    second.metrics = ReportedMetrics(prompt_tokens=200, prefill_cached_tokens=128, cached_tokens=200)
    assert told(record)["cached_tokens"] == 128
    second.metrics = ReportedMetrics(prompt_tokens=250, prefill_cached_tokens=250, cached_tokens=200)
    assert told(record)["cached_tokens"] == 200


def test_tokens_cached_only_on_the_decode_node_are_not_counted() -> None:
    record = a_record(200)
    begun(record, "p1", "d1").metrics = ReportedMetrics(prompt_tokens=200, prefill_cached_tokens=100, cached_tokens=150)
    assert told(record)["cached_tokens"] == 100


def test_choices_on_several_nodes_count_the_cache_of_the_first() -> None:
    record = a_record(200)
    for cached in (64, 199, 199):
        begun(record, None, "d1").metrics = ReportedMetrics(prompt_tokens=200, cached_tokens=cached)
    assert told(record)["cached_tokens"] == 64


def test_a_request_that_reached_no_node() -> None:
    metrics = told(a_record(200))
    assert (metrics["cached_tokens"], metrics["prefill_speed"], metrics["waterfall"]) == (0, 0.0, [])


def test_a_failed_phase_ends_when_the_failure_was_detected(clock: Clock) -> None:
    record = a_record(200, clock)
    first = begun(record, "p1", "d1")
    clock.now += 2.0
    failed(record, first, "p1")
    second = begun(record, "p2", "d1")
    wrote(record, second, clock.now + 0.5)
    clock.now += 1.0
    failed(record, second, "d1")
    begun(record, "p2", "d2")
    clock.now += 4.0  # and then its time was over
    bars = [(bar["name"], bar["node"], bar["start_s"], bar["seconds"]) for bar in told(record)["waterfall"]]
    assert bars == [("failed", "p1", 0.0, 2.0), ("failed", "d1", 2.0, 1.0), ("failed", "d2", 3.0, 4.0)]
