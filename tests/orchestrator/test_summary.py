"""The cards of the dashboard and of `disagg top`."""

from typing import Any

import pytest

from disaggregated_inference.api import Completion, ErrorDetail, MergedCompletions, RequestRecord
from disaggregated_inference.orchestrator import is_cached, speedup, summary
from disaggregated_inference.orchestrator.outcomes import BusyTime


def request(time: float, total_s: float, **more: Any) -> RequestRecord:
    usual: dict[str, Any] = {"model": "m", "time": time, "total_time": total_s, "completion_tokens": 10}
    return RequestRecord(**(usual | more))


def test_medians_of_answered_requests() -> None:
    times = {"prefill_time": 1.0, "prefill_speed": 100.0, "decode_time": 2.0, "decode_speed": 5.0}
    cached = {"cached_tokens": 95, "prompt_tokens": 100, "prefill_speed": 1.0, "prefill_time": 3.0}
    records = [
        request(0, 3, **times, kv_bytes=9, exposed_transfer_time=0.5, first_token_time=1.0),
        request(9, 5, **times | cached, exposed_transfer_time=0.0),
        request(20, 90, model="other"),
        request(30, 90, ok=False, **times),
    ]
    found = summary(records, ["m", "other", "quiet"])
    card = found.models["m"]
    assert (card.answered, card.total_time, card.prefill_time, card.decode_speed) == (2, 4.0, 2.0, 5.0)
    assert card.prefill_speed == 100.0, "not that of a cached prompt"
    assert card.exposed_transfer_time == 0.5, "of requests whose KV moved"
    assert found.models["quiet"].total_time is None
    assert found.models["other"].decode_time is None
    assert found.combined.answered == 3
    assert found.combined.tokens_per_s == pytest.approx(30 / 98)


def test_the_speedup_is_sequential_time_over_wall_time() -> None:
    """The user's drawing: 9.3 s and 22.1 s at once on different machines."""
    assert speedup([request(0, 9.3, sequential_time=9.3), request(0, 22.1, sequential_time=22.1)]) == pytest.approx(
        31.4 / 22.1
    )
    batch = [request(0, 10, sequential_time=4.0) for _ in range(4)]
    assert speedup(batch) == pytest.approx(1.6), "not 4, although four ran at once"
    one_by_one = [request(0, 10, sequential_time=8.0), request(10, 10, sequential_time=8.0)]
    assert speedup(one_by_one) == pytest.approx(1.0), "each had the cluster to itself"
    waited = [request(0, 10, sequential_time=10.0), request(1, 19, sequential_time=10.0)]
    assert speedup(waited) == pytest.approx(1.0), "waiting for each other is no speedup"
    assert speedup([request(0, 10), request(0, 10)]) == pytest.approx(2.0), "records of an earlier version"
    assert speedup([]) is None


def test_many_at_once_have_the_same_speedup() -> None:
    def speedup_of(*results: RequestRecord | ErrorDetail) -> float:
        many = [Completion(choices=(), record=each) if isinstance(each, RequestRecord) else each for each in results]
        return MergedCompletions(results=tuple(many), wall_time=10.0).speedup

    assert speedup_of(*[request(0, 10, sequential_time=4.0)] * 4) == pytest.approx(1.6)
    assert speedup_of(request(0, 10), ErrorDetail()) == pytest.approx(1.0)


def test_a_cached_prompt() -> None:
    assert is_cached(RequestRecord(cached_tokens=90, prompt_tokens=100))
    assert not is_cached(RequestRecord(cached_tokens=89, prompt_tokens=100))
    assert not is_cached(RequestRecord(cached_tokens=0, prompt_tokens=0))
    assert not is_cached(RequestRecord())


def test_busy_time_counts_once_what_runs_at_once() -> None:
    moments = iter([0.0, 5.0, 10.0, 12.0])
    busy = BusyTime(lambda: next(moments))
    assert busy.seconds == 0
    busy.began()  # 0
    busy.began()
    busy.ended()
    assert busy.seconds == 5  # 5
    busy.ended()  # 10
    assert busy.seconds == 10
