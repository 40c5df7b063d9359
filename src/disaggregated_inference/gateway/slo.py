"""Service level targets beside measured values, from the history in memory and the nodes' last status.

`measured` and `met` are null where nothing was measured.
"""

import statistics
import time
from collections.abc import Iterable, Sequence

import msgspec

from disaggregated_inference.api import ClusterNode, ClusterStatus, RequestRecord, Target
from disaggregated_inference.gateway.metrics import STATUS_OF
from disaggregated_inference.orchestrator import (
    HistoryFilter,
    HistoryReader,
    cost_is_partial,
    longest_stall_s,
    span,
    speedup,
)

parallel_efficiency = speedup  # the name of the target
_RECENT_S = 60.0


class TargetFigures(msgspec.Struct):
    """What the targets need of a request: columns of the history."""

    time: float
    ok: bool
    outcome: str | None = None
    error_code: str | None = None
    total_time: float | None = None
    sequential_time: float | None = None
    stall_s: float | None = None
    energy_j: float | None = None
    cost: float | None = None
    cost_is_partial: bool | None = None


def figures_of(record: RequestRecord) -> TargetFigures:
    return TargetFigures(
        time=record.time,
        ok=record.ok,
        outcome=record.outcome,
        error_code=record.error.code if record.error else None,
        total_time=record.total_time,
        sequential_time=record.sequential_time,
        stall_s=longest_stall_s(record),
        energy_j=record.energy_j,
        cost=record.cost,
        cost_is_partial=cost_is_partial(record),
    )


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
    requests: Sequence[TargetFigures],
    nodes: Sequence[ClusterNode],
    now: float | None = None,
    uptime: float | None = None,
) -> tuple[Target, ...]:
    """`requests`: of the history. `nodes`, `uptime`: as in the orchestrator's status."""
    since = (now or time.time()) - _RECENT_S
    recent = [each for each in requests if span(each)[1] > since]
    answered = [each for each in requests if each.ok]
    energy_j = _mean(each.energy_j for each in answered)
    measured = {
        "end_to_end": _p95([each.total_time for each in answered if each.total_time]),
        "requests_per_second": sum(bool(each.ok) for each in recent) / _RECENT_S if recent else None,
        "parallel_efficiency": parallel_efficiency([each for each in recent if each.ok]),
        "uptime": None if uptime is None else 100 * uptime,
        "errors": error_share(requests),
        "failover": max((each.stall_s for each in requests if each.stall_s), default=None),
        "cost_per_request": _mean(each.cost for each in answered),
        "requests_per_kwh": _JOULES_PER_KWH / energy_j if energy_j else None,
        "utilisation": _utilisation(nodes) if requests else None,
    }
    found = {target.name: _measured(target, measured.get(target.name)) for target in _TARGETS}
    if any(each.cost_is_partial for each in answered):
        found["cost_per_request"] = _at_least(found["cost_per_request"])
    return tuple(found.values())


_MOST = 20_000  # requests of which targets are computed: the newest
_JOULES_PER_KWH = 3.6e6


def targets_of(reader: HistoryReader, wanted: HistoryFilter, status: ClusterStatus) -> tuple[Target, ...]:
    """Of the requests in the history that are wanted."""
    return targets(reader.figures(wanted, TargetFigures, _MOST), status.nodes, uptime=status.uptime)


def _measured(target: Target, measured: float | None) -> Target:
    if measured is None:
        return target
    met = measured < target.goal if target.better == "lower" else measured > target.goal
    return msgspec.structs.replace(target, measured=measured, met=met)


def _at_least(target: Target) -> Target:
    """A value that lacks a part: it can miss the goal, but not meet it."""
    what = f"{target.what}; a lower bound, prices are missing"
    return msgspec.structs.replace(target, what=what, met=None if target.met else target.met)


def error_share(requests: Sequence[TargetFigures]) -> float | None:
    """Per cent. Refused and cancelled requests do not count."""
    counted = [each for each in requests if each.ok or _is_cluster_error(each)]
    return 100 * sum(not each.ok for each in counted) / len(counted) if counted else None


def _is_cluster_error(request: TargetFigures) -> bool:
    return request.outcome == "failed" and STATUS_OF.get(request.error_code or "", 500) >= 500


def _p95(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _utilisation(nodes: Sequence[ClusterNode]) -> float | None:
    slots = [node.slots for node in nodes if node.usable and node.role != "prefill"]
    total = sum(each.most for each in slots)
    return 100 * sum(each.used for each in slots) / total if total else None
