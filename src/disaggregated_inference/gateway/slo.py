"""Service level targets beside measured values, from the history in memory and the nodes' last status.

`measured` and `met` are null where nothing was measured.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from disaggregated_inference.api import ClusterNode, ClusterStatus, Target
from disaggregated_inference.gateway.metrics import STATUS_OF
from disaggregated_inference.orchestrator import HistoryFilter, HistoryReader, speedup

Record = dict[str, Any]

parallel_efficiency = speedup  # the name of the target
_RECENT_S = 60.0


_TARGETS = (
    Target(name="end_to_end", unit="s", goal=15, better="lower", what="p95 of answered requests"),
    Target(name="requests_per_second", unit="1/s", goal=10, better="higher", what="answered in the last minute"),
    Target(
        name="parallel_efficiency",
        unit="x",
        goal=1.5,
        better="higher",
        what="one after the other, over wall time, last minute",
    ),
    Target(name="uptime", unit="%", goal=99.9, better="higher", what="time in which all models could be served"),
    Target(name="errors", unit="%", goal=0.1, better="lower", what="failures that were not the request's own fault"),
    Target(name="failover", unit="s", goal=5, better="lower", what="longest gap in an answer over a failed node"),
    Target(name="cost_per_request", unit="$", goal=0.01, better="lower", what="mean of requests whose cost is known"),
    Target(name="requests_per_kwh", unit="1/kWh", goal=50, better="higher", what="answered, energy known"),
    Target(name="utilisation", unit="%", goal=60, better="higher", what="slots of decode nodes in use, now"),
)


def targets(
    records: Sequence[Record], nodes: Sequence[ClusterNode], now: float | None = None, uptime: float | None = None
) -> tuple[Target, ...]:
    """`records`: the history. `nodes`, `uptime`: as in the orchestrator's status."""
    recent = [record for record in records if _span(record)[1] > (now or time.time()) - _RECENT_S]
    answered = [record for record in records if record.get("ok")]
    energy_wh = _mean(record.get("energy_wh") for record in answered)
    measured = {
        "end_to_end": _p95([record["total_time"] for record in answered if record.get("total_time")]),
        "requests_per_second": sum(bool(record.get("ok")) for record in recent) / _RECENT_S if recent else None,
        "parallel_efficiency": parallel_efficiency([record for record in recent if record.get("ok")]),
        "uptime": None if uptime is None else 100 * uptime,
        "errors": error_share(records),
        "failover": max(_stalls(records), default=None),
        "cost_per_request": _mean(record.get("cost") for record in answered),
        "requests_per_kwh": 1000 / energy_wh if energy_wh else None,
        "utilisation": _utilisation(nodes) if records else None,
    }
    partial = any(record.get("cost_without") for record in answered if record.get("cost") is not None)
    found = {target.name: _measured(target, measured.get(target.name)) for target in _TARGETS}
    if partial:
        found["cost_per_request"] = _at_least(found["cost_per_request"])
    return tuple(found.values())


_MOST = 20_000  # requests of which targets are computed: the newest
_FIGURES = (
    *("time", "ok", "outcome", "error_code", "total_time", "sequential_time", "stall_s", "energy_j"),
    *("cost", "cost_is_partial"),
)


def targets_of(reader: HistoryReader, wanted: HistoryFilter, status: ClusterStatus) -> tuple[Target, ...]:
    """Of the requests in the history that are wanted."""
    records = [_record_of(figures) for figures in reader.figures(wanted, _FIGURES, _MOST)]
    return targets(records, status.nodes, uptime=status.uptime)


def _record_of(figures: Record) -> Record:
    energy_j = figures["energy_j"]
    return figures | {
        "error": {"code": figures["error_code"]},
        "failovers": [{"stall_s": figures["stall_s"]}],
        "energy_wh": None if energy_j is None else energy_j / 3600,
        "cost_without": ["a price"] if figures["cost_is_partial"] else [],
    }


def _measured(target: Target, measured: float | None) -> Target:
    if measured is None:
        return target
    met = measured < target.goal if target.better == "lower" else measured > target.goal
    return msgspec.structs.replace(target, measured=measured, met=met)


def _at_least(target: Target) -> Target:
    """A value that lacks a part: it can miss the goal, but not meet it."""
    what = f"{target.what}; a lower bound, prices are missing"
    return msgspec.structs.replace(target, what=what, met=None if target.met else target.met)


def error_share(records: Sequence[Record]) -> float | None:
    """Per cent. Refused and cancelled requests do not count."""
    counted = [record for record in records if record.get("ok") or _is_cluster_error(record)]
    return 100 * sum(not record.get("ok") for record in counted) / len(counted) if counted else None


def _is_cluster_error(record: Record) -> bool:
    code = str((record.get("error") or {}).get("code"))
    return record.get("outcome") == "failed" and STATUS_OF.get(code, 500) >= 500


def _span(record: Record) -> tuple[float, float]:
    start: float = record.get("time") or 0.0
    return start, start + (record.get("total_time") or 0.0)


def _stalls(records: Sequence[Record]) -> list[float]:
    return [stall for record in records for each in record.get("failovers") or () if (stall := each.get("stall_s"))]


def _p95(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


def _mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _utilisation(nodes: Sequence[ClusterNode]) -> float | None:
    slots = [node.slots for node in nodes if node.usable and node.role != "prefill"]
    total = sum(each.most for each in slots)
    return 100 * sum(each.used for each in slots) / total if total else None
