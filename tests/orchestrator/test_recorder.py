"""What is told of a request that did not go straight: what was held, what was read, who failed and for how long."""

from typing import Any

import pytest

from disaggregated_inference.api import FALLBACK_WARNING, Failover, ReportedMetrics
from disaggregated_inference.cluster import Policies, Server
from disaggregated_inference.orchestrator.attempt import Attempt
from disaggregated_inference.orchestrator.cluster_view import Route
from disaggregated_inference.orchestrator.recorder import ChoiceState, RequestRecorder

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
    record.failed(Failover(node=node, code="unreachable", message="it does not answer"), attempt)


def told(record: RequestRecorder) -> dict[str, Any]:
    return record.finish(SERVERS, Policies()).metrics()


@pytest.mark.parametrize(
    ("prefill", "state", "kind", "method"),
    [
        ("p1", {}, "disaggregated", "disaggregated_mlx"),
        (None, {}, "local", "local"),
        (None, {"fallback": True}, "fallback", "fallback"),
        (None, {"prefill_down": True}, "fallback", "local"),
    ],
)
def test_the_kind_of_a_request(prefill: str | None, state: dict[str, bool], kind: str, method: str) -> None:
    """A client gets the method. The warning tells it that a local prefill is a fallback."""
    recorder = a_record(200)
    begun(recorder, prefill, "d1")
    for name, value in state.items():
        setattr(recorder, name, value)
    record = recorder.finish(SERVERS, Policies())
    assert (record.kind, record.method) == (kind, method)
    assert record.warning == (FALLBACK_WARNING if kind == "fallback" else None)
    assert "kind" not in record.metrics()


def test_other_kinds_of_a_request() -> None:
    recorder = a_record(200)
    assert recorder.finish(SERVERS, Policies()).kind is None, "no node was contacted"
    recorder.begin(Route(decode="d1", prefill=None, first_token_s=0.0, total_s=0.0), "", "vllm", whole=True)
    record = recorder.finish(SERVERS, Policies())
    assert (record.kind, record.method) == ("whole", "whole_vllm")


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
    metrics = told(record)
    bars = [(bar["name"], bar["node"], bar["start_s"], bar["seconds"]) for bar in metrics["waterfall"]]
    assert bars == [
        ("failed", "p1", 0.0, 2.0),
        ("prefill", "p2", 2.0, 0.5),  # the second attempt brought a token
        ("failed", "d1", 2.5, 0.5),
        ("failed", "d2", 3.0, 4.0),
    ]
    assert added_up(metrics) == metrics["total_time"] == 7.0


def test_the_phases_of_a_slow_line_add_up(clock: Clock) -> None:
    """Computing ends at 2 s, the logits arrive at 3 s, the last slice at 5 s, the last token at 9 s."""
    record = a_record(200, clock)
    attempt = begun(record, "p1", "d1")
    wrote(record, attempt, clock.now + 3.0)
    clock.now = attempt.ended_at = clock.now + 9.0
    attempt.metrics = ReportedMetrics(
        prompt_tokens=200,
        completion_tokens=9,
        queue_time=0.5,
        prefill_time=1.5,
        admission_time=0.25,
        canary_time=1.0,
        fetch_time=4.5,
        exposed_transfer_time=3.0,
        decode_time=4.0,
        total_time=8.5,
    )
    record.choice_states = [ChoiceState(written=list(range(9)))]
    clock.now += 0.5  # and then the record
    metrics = told(record)
    bars = [(bar["name"], bar["node"], bar["start_s"], bar["seconds"]) for bar in metrics["waterfall"]]
    assert bars == [
        ("prefill queue", "p1", 0.0, 0.5),  # admission and canary on d1 are hidden behind it, and behind the prefill
        ("prefill", "p1", 0.5, 1.5),
        ("exposed transfer", "d1", 2.0, 3.0),
        ("decode", "d1", 5.0, 4.0),
        ("overhead", "", 9.0, 0.5),
    ]
    assert (metrics["decode_time"], metrics["decode_speed"]) == (4.0, 8 / 4.0)
    assert (metrics["first_token_time"], added_up(metrics)) == (3.0, 9.5)
    assert metrics["output_token_time"] == (9.5 - 3.0) / 8, "what of the transfer follows the first token is part of it"


def test_a_prefill_that_ended_before_the_decode_node_had_memory(clock: Clock) -> None:
    record = a_record(200, clock)
    attempt = begun(record, "p1", "d1")
    wrote(record, attempt, clock.now + 6.5)
    clock.now = attempt.ended_at = clock.now + 8.0
    attempt.metrics = ReportedMetrics(
        prefill_time=2.0, admission_time=6.0, fetch_time=1.0, exposed_transfer_time=1.0, decode_time=1.0, total_time=8.0
    )
    metrics = told(record)
    assert [(bar["name"], bar["start_s"], bar["seconds"]) for bar in metrics["waterfall"]] == [
        ("prefill", 0.0, 2.0),
        ("admission", 2.0, 4.0),
        ("exposed transfer", 6.0, 1.0),
        ("decode", 7.0, 1.0),
    ]


def test_the_prompt_was_read_when_the_first_token_came(clock: Clock) -> None:
    """The last event of an answer may come late: what the nodes report did not."""
    record = a_record(200, clock)
    attempt = begun(record, None, "d1")
    wrote(record, attempt, clock.now + 1.0)
    clock.now = attempt.ended_at = clock.now + 3.5
    attempt.metrics = ReportedMetrics(prefill_time=1.0, decode_time=2.0, total_time=3.0)
    bars = [(bar["name"], bar["start_s"], bar["seconds"]) for bar in told(record)["waterfall"]]
    assert bars == [("prefill", 0.0, 1.0), ("decode", 1.0, 2.0), ("overhead", 3.0, 0.5)]


def test_a_node_that_reports_more_than_there_was_changes_no_other_phase(clock: Clock) -> None:
    record = a_record(200, clock)
    clock.now += 1.0
    record.phase("queue", clock.now - 1.0)
    attempt = begun(record, None, "d1")
    clock.now = attempt.ended_at = clock.now + 2.0
    attempt.metrics = ReportedMetrics(prefill_time=1e6, decode_time=1e6, exposed_transfer_time=-5.0, total_time=1e9)
    metrics = told(record)
    assert [(bar["name"], bar["seconds"]) for bar in metrics["waterfall"]] == [("queue", 1.0), ("decode", 2.0)]


def test_waits_for_a_node_are_one_phase(clock: Clock) -> None:
    record = a_record(200, clock)
    for _ in range(100):
        since, clock.now = clock.now, clock.now + 0.0625
        record.waited(since)
    [bar] = told(record)["waterfall"]
    assert (bar["name"], bar["seconds"]) == ("queue", 6.25)


def added_up(metrics: dict[str, Any]) -> float:
    return float(sum(bar["seconds"] for bar in metrics["waterfall"]))
