"""The cards of the dashboard and of `disagg top`: medians of the last requests, and what overlapping them brought.

One place, so that every screen shows the same figures.
"""

import statistics
from collections.abc import Iterable, Sequence
from typing import Protocol

from disaggregated_inference.api import CombinedSummary, ModelSummary, RequestRecord, Summary
from disaggregated_inference.orchestrator.history_table import is_number

RECENT_REQUESTS = 50  # that a summary is about
_CACHED = 0.9  # of a prompt: the speed of the rest says nothing of the machine


class TimedRequest(Protocol):
    @property
    def time(self) -> float: ...
    @property
    def total_time(self) -> float | None: ...
    @property
    def sequential_time(self) -> float | None: ...


def summary(records: Sequence[RequestRecord], models: Sequence[str]) -> Summary:
    """`records`: the last ones, in any order."""
    answered = [record for record in records if record.ok]
    return Summary(
        models={model: _of_model([each for each in answered if each.model == model]) for model in models},
        combined=_combined(answered),
    )


def is_cached(record: RequestRecord) -> bool:
    return record.cached_tokens >= _CACHED * max(1, record.prompt_tokens)


def speedup(records: Sequence[TimedRequest]) -> float | None:
    """The sum of what each would have taken by itself, over the time in which at least one of them ran."""
    busy_s = busy_seconds(records)
    return sequential_seconds(records) / busy_s if busy_s else None


def busy_seconds(records: Sequence[TimedRequest]) -> float:
    busy_s, until = 0.0, float("-inf")
    for start, end in sorted(map(span, records)):
        busy_s += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy_s


def sequential_seconds(records: Sequence[TimedRequest]) -> float:
    """A request that no other overlapped had the cluster to itself: it took what it took. A record of an earlier
    version does not say what it would have taken."""
    spans = sorted((*span(record), _alone_s(record)) for record in records)
    total_s, until = 0.0, float("-inf")
    for place, (start, end, alone_s) in enumerate(spans):
        following = spans[place + 1][0] if place + 1 < len(spans) else float("inf")
        total_s += alone_s if start < until or following < end else end - start
        until = max(until, end)
    return total_s


def span(record: TimedRequest) -> tuple[float, float]:
    """When it came, and when it ended."""
    return record.time, record.time + (record.total_time or 0.0)


def _alone_s(record: TimedRequest) -> float:
    found = record.sequential_time
    return found if is_number(found) else record.total_time or 0.0


def _of_model(answered: Sequence[RequestRecord]) -> ModelSummary:
    moved = [record for record in answered if record.kv_bytes]
    return ModelSummary(
        answered=len(answered),
        all_cached=bool(answered) and all(map(is_cached, answered)),
        prefill_time=_median(record.prefill_time for record in answered),
        prefill_speed=_median(record.prefill_speed for record in answered if not is_cached(record)),
        decode_time=_median(record.decode_time for record in answered),
        decode_speed=_median(record.decode_speed for record in answered),
        total_time=_median(record.total_time for record in answered),
        first_token_time=_median(record.first_token_time for record in answered),
        exposed_transfer_time=_median(record.exposed_transfer_time for record in moved),
    )


def _combined(answered: Sequence[RequestRecord]) -> CombinedSummary:
    busy_s = busy_seconds(answered)
    if not busy_s:
        return CombinedSummary(answered=len(answered))
    sequential_s = sequential_seconds(answered)
    return CombinedSummary(
        answered=len(answered),
        busy_time=busy_s,
        sequential_time=sequential_s,
        speedup=sequential_s / busy_s,
        tokens_per_s=sum(record.completion_tokens for record in answered) / busy_s,
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if is_number(value) and value > 0]
    return statistics.median(known) if known else None
