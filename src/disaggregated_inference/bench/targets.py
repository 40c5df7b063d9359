"""The targets of `/cluster/targets` beside what a benchmark measured: benchmarks and dashboard have the same goals."""

from collections.abc import Mapping, Sequence

from disaggregated_inference.api import RequestRecord
from disaggregated_inference.bench.report import Row
from disaggregated_inference.gateway import figures_of, targets

LOAD = {"end_to_end", "requests_per_second", "parallel_efficiency", "errors", "requests_per_kwh"}
ELSEWHERE = (
    "Targets that this does not measure: failover (`disagg chaos` kills nodes), uptime and utilisation (of a cluster in"
    " use: `disagg top`, /dashboard), cost (it takes prices)"
)


def target_rows(name: str, records: Sequence[RequestRecord], measured: Mapping[str, float]) -> list[Row]:
    """Those of a load that are known. `records`: of its requests. `measured`: what the whole load tells."""
    known = targets([figures_of(each) for each in records], nodes=())
    found = [(target, measured.get(target.name, target.measured)) for target in known]
    return [
        Row(
            _title(name, target.name, target.what),
            value,
            target.unit,
            goal=target.goal,
            at_most=target.better == "lower",
        )
        for target, value in found
        if target.name in LOAD and value is not None
    ]


def goal_of(name: str) -> float:
    """A target's."""
    return next(target.goal for target in targets([], []) if target.name == name)


def _title(name: str, target: str, what: str) -> str:
    words = target.replace("_", " ").replace("kwh", "kWh")
    return f"{name}: {words}" + (f", {what}" if target in ("end_to_end", "errors") else "")
