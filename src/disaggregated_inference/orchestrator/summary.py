"""The cards of the dashboard and of `disagg top`: medians of the last requests, and what overlapping them brought.

One place, so that every screen shows the same figures.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from disaggregated_inference.api import CombinedSummary, ModelSummary, Summary
from disaggregated_inference.orchestrator.history_table import Record, is_number

RECENT_REQUESTS = 50  # that a summary is about
_CACHED = 0.9  # of a prompt: the speed of the rest says nothing of the machine


def summary(records: Sequence[Record], models: Sequence[str]) -> Summary:
    """`records`: the last ones, in any order."""
    answered = [record for record in records if record.get("ok")]
    return Summary(
        models={model: _of_model([each for each in answered if each.get("model") == model]) for model in models},
        combined=_combined(answered),
    )


def is_cached(record: Record) -> bool:
    return (record.get("cached_tokens") or 0) >= _CACHED * max(1, record.get("prompt_tokens") or 0)


def speedup(records: Sequence[Record]) -> float | None:
    """The sum of what each would have taken by itself, over the time in which at least one of them ran."""
    busy_s = busy_seconds(records)
    return sequential_seconds(records) / busy_s if busy_s else None


def busy_seconds(records: Sequence[Record]) -> float:
    busy_s, until = 0.0, float("-inf")
    for start, end in sorted(map(_span, records)):
        busy_s += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy_s


def sequential_seconds(records: Sequence[Record]) -> float:
    """A request that no other overlapped had the cluster to itself: it took what it took. A record of an earlier
    version does not say what it would have taken."""
    spans = sorted((*_span(record), _alone_s(record)) for record in records)
    total_s, until = 0.0, float("-inf")
    for place, (start, end, alone_s) in enumerate(spans):
        following = spans[place + 1][0] if place + 1 < len(spans) else float("inf")
        total_s += alone_s if start < until or following < end else end - start
        until = max(until, end)
    return total_s


def _span(record: Record) -> tuple[float, float]:
    start: float = record.get("time") or 0.0
    return start, start + (record.get("total_time") or 0.0)


def _alone_s(record: Record) -> float:
    found = record.get("sequential_time")
    return found if is_number(found) else record.get("total_time") or 0.0


def _of_model(answered: Sequence[Record]) -> ModelSummary:
    moved = [record for record in answered if record.get("kv_bytes")]
    return ModelSummary(
        answered=len(answered),
        all_cached=bool(answered) and all(map(is_cached, answered)),
        prefill_time=_median(answered, "prefill_time"),
        prefill_speed=_median([record for record in answered if not is_cached(record)], "prefill_speed"),
        decode_time=_median(answered, "decode_time"),
        decode_speed=_median(answered, "decode_speed"),
        total_time=_median(answered, "total_time"),
        first_token_time=_median(answered, "first_token_time"),
        exposed_transfer_time=_median(moved, "exposed_transfer_time"),
    )


def _combined(answered: Sequence[Record]) -> CombinedSummary:
    busy_s = busy_seconds(answered)
    if not busy_s:
        return CombinedSummary(answered=len(answered))
    sequential_s = sequential_seconds(answered)
    return CombinedSummary(
        answered=len(answered),
        busy_time=busy_s,
        sequential_time=sequential_s,
        speedup=sequential_s / busy_s,
        tokens_per_s=sum(record.get("completion_tokens") or 0 for record in answered) / busy_s,
    )


def _median(records: Sequence[Record], name: str) -> float | None:
    values: list[Any] = [record.get(name) for record in records]
    known = [value for value in values if is_number(value) and value > 0]
    return statistics.median(known) if known else None
