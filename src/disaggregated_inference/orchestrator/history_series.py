"""Figures of the history over time: one value per interval, and totals of energy and cost."""

import math
from typing import Any

import msgspec

from disaggregated_inference.orchestrator.history_reader import HistoryFilter, HistoryReader

MAX_POINTS = 500
_POINTS = 120  # where the step is not given
_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
_PART = "CAST((time - :since) / :step_s AS INTEGER)"
_LEAST_OF_LAST = 0.25  # of an interval that has not ended: less of it makes no rate

_COUNTS = {
    "requests": "COUNT(*)",
    "ok": "SUM(outcome = 'ok')",
    "failed": "SUM(outcome = 'failed')",
    "refused": "SUM(outcome = 'refused')",
    "cancelled": "SUM(outcome = 'cancelled')",
    "prompt_tokens": "SUM(prompt_tokens)",
    "completion_tokens": "SUM(completion_tokens)",
    "cached_tokens": "SUM(CASE WHEN completion_tokens > 0 THEN MIN(cached_tokens, prompt_tokens) END)",
    "looked_up_tokens": "SUM(CASE WHEN completion_tokens > 0 THEN prompt_tokens END)",
    "disaggregated": "SUM(ok AND kind = 'disaggregated')",
    "local": "SUM(ok AND kind = 'local')",
    "fallback": "SUM(ok AND kind = 'fallback')",
    "planned": "SUM(ok AND kind IS NOT NULL)",
    "recomputed_tokens": "SUM(CASE WHEN kind = 'disaggregated' THEN prompt_tokens_recomputed END)",
    "kv_bytes": "SUM(kv_bytes)",
    "energy_j": "SUM(energy_j)",
    "energy_requests": "SUM(energy_j IS NOT NULL)",
    "cost": "SUM(cost)",
}
_PERCENTILES = {
    "ttft": ("NULLIF(first_token_time, 0)", (50, 95, 99)),
    "tpot": ("output_token_time", (50, 95, 99)),
    "e2e": ("CASE WHEN ok THEN total_time END", (50, 95, 99)),
    "queue": ("wait_time", (50, 95, 99)),
    "exposed": ("CASE WHEN kv_bytes > 0 THEN exposed_transfer_time END", (95,)),
}
_EACH = ("requests", "ok", "failed", "refused", "cancelled", "recomputed_tokens", "kv_bytes")
_RATES = {
    "requests_per_s": "ok",
    "prompt_tokens_per_s": "prompt_tokens",
    "completion_tokens_per_s": "completion_tokens",
}
_IF_KNOWN = ("energy_j", "energy_requests", "cost")


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """`times`: where each interval begins, in seconds since 1970. `series`: one value per interval; None: nothing was
    measured in it, or it ended before the oldest request that is kept. The last interval ends with the time that is
    asked for: its rates are those of that part, and None if the part is too short."""

    step_s: float
    times: list[float]
    series: dict[str, list[float | None]]


def step_of(range_s: float, wish_s: float | None = None) -> float:
    """The length of an interval: the wish, or one that makes about a hundred of them; never more than MAX_POINTS."""
    least_s = range_s / (MAX_POINTS if wish_s else _POINTS)
    return next((step for step in _STEPS_S if step >= max(least_s, wish_s or 0.0)), math.ceil(least_s / 86400) * 86400)


def series(reader: HistoryReader, wanted: HistoryFilter, wish_s: float | None = None) -> Series:
    """Intervals begin at multiples of their length, so that two calls have the same ones."""
    step_s = step_of(wanted.until - wanted.since, wish_s)
    since = math.floor(wanted.since / step_s) * step_s
    wanted = msgspec.structs.replace(wanted, since=since)
    parts = range(max(1, math.ceil((wanted.until - since) / step_s)))
    counts = reader.grouped(wanted, _PART, _COUNTS, step_s=step_s)
    last_s = wanted.until - since - parts[-1] * step_s
    found = _figures([counts.get(part, {}) for part in parts], [step_s] * parts[-1] + [min(last_s, step_s)])
    oldest = reader.kept(HistoryFilter(caller=wanted.caller))["oldest"]
    unknown = [oldest is None or since + (part + 1) * step_s <= oldest for part in parts]
    for name in (*_EACH, *_RATES):
        found[name] = [None if gone else value for gone, value in zip(unknown, found[name], strict=True)]
    if last_s < _LEAST_OF_LAST * step_s:
        for name in _RATES:
            found[name][-1] = None
    for name, (column, shares) in _PERCENTILES.items():
        values = reader.percentiles(wanted, column, tuple(share / 100 for share in shares), _PART, step_s=step_s)
        for index, share in enumerate(shares):
            found[f"{name}_p{share}"] = [values[part][index] if part in values else None for part in parts]
    return Series(step_s=step_s, times=[since + part * step_s for part in parts], series=found)


def _figures(parts: list[dict[str, Any]], lengths_s: list[float]) -> dict[str, list[float | None]]:
    found: dict[str, list[float | None]] = {name: [part.get(name) or 0 for part in parts] for name in _EACH}
    found |= {name: [part.get(name) for part in parts] for name in _IF_KNOWN}
    for name, source in _RATES.items():
        found[name] = [(part.get(source) or 0) / length_s for part, length_s in zip(parts, lengths_s, strict=True)]
    for name in ("disaggregated", "local", "fallback"):
        found[name] = [_ratio(part.get(name), part.get("planned")) for part in parts]
    found["prefix_hit_rate"] = [_ratio(part.get("cached_tokens"), part.get("looked_up_tokens")) for part in parts]
    found["errors"] = [_ratio(part.get("failed"), (part.get("failed") or 0) + (part.get("ok") or 0)) for part in parts]
    found["energy_j_per_request"] = [_ratio(part.get("energy_j"), part.get("energy_requests")) for part in parts]
    return found


def _ratio(part: float | None, whole: float | None) -> float | None:
    return (part or 0) / whole if whole else None
