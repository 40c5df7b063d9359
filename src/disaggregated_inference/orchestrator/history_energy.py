"""Energy and cost of the requests in the history: in all, by model, by API key, by day and by node."""

from typing import Any

import msgspec

from disaggregated_inference.orchestrator.history_reader import HistoryFilter, HistoryReader

_KWH_J = 3.6e6
_PARTS = "json_array(model, COALESCE(caller, ''), strftime('%Y-%m-%d', time, 'unixepoch'))"
_COLUMNS = {
    "requests": "COUNT(*)",
    "answered": "SUM(ok)",
    "with_energy": "SUM(energy_j IS NOT NULL)",
    "answered_with_energy": "SUM(ok AND energy_j IS NOT NULL)",
    "energy_j": "SUM(energy_j)",
    "measured_j": "SUM(CASE WHEN energy_j IS NOT NULL THEN MIN(measured_j, energy_j) END)",
    "completion_tokens": "SUM(CASE WHEN energy_j IS NOT NULL THEN completion_tokens END)",
    "cost": "SUM(cost)",
    "cost_partial": "SUM(COALESCE(cost_is_partial, 0))",
}


class EnergySum(msgspec.Struct, frozen=True, kw_only=True):
    """Of some requests. Requests without a known energy count in `requests` alone. None: unknown."""

    requests: int = 0
    answered: int = 0
    with_energy: int = 0
    energy_j: float | None = None
    measured_j: float | None = None  # by meters
    configured_j: float | None = None  # from the watts of the cluster file
    cost: float | None = None
    cost_partial: int = 0  # requests whose cost lacks a price, or their energy: the sum is too low by that
    requests_per_kwh: float | None = None  # answered ones
    joules_per_token: float | None = None  # of the completion


class EnergySums(msgspec.Struct, frozen=True, kw_only=True):
    """Callers: an empty name is that of requests without an API key. Days are those of UTC, as budgets have them."""

    total: EnergySum
    models: dict[str, EnergySum]
    callers: dict[str, EnergySum]
    days: dict[str, EnergySum]


def energy_sums(reader: HistoryReader, wanted: HistoryFilter) -> EnergySums:
    """SQLite reads the requests once, for all sums."""
    parts = [(msgspec.json.decode(part), figures) for part, figures in reader.grouped(wanted, _PARTS, _COLUMNS).items()]
    models, callers, days = (_merged([(keys[place], figures) for keys, figures in parts]) for place in range(3))
    total = _merged([("", figures) for _, figures in parts]).get("", EnergySum())
    return EnergySums(total=total, models=models, callers=callers, days=days)


def energy_by_node(reader: HistoryReader, wanted: HistoryFilter) -> dict[str, dict[str, float]]:
    """Joules of requests on each node, by source."""
    found: dict[str, dict[str, float]] = {}
    for node, source, joules, requests in reader.energy_shares(wanted):
        found.setdefault(node, {})[f"{source}_j"] = joules
        found[node]["requests"] = found[node].get("requests", 0) + requests
    return found


def _merged(parts: list[tuple[str, dict[str, Any]]]) -> dict[str, EnergySum]:
    found: dict[str, dict[str, Any]] = {}
    for key, figures in parts:
        before = found.get(key, {})
        found[key] = {name: _plus(before.get(name), value) for name, value in figures.items()}
    return {key: _sum(found[key]) for key in sorted(found)}


def _plus(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else one + other


def _sum(figures: dict[str, Any]) -> EnergySum:
    energy_j, measured_j, tokens = figures["energy_j"], figures["measured_j"], figures["completion_tokens"]
    return EnergySum(
        requests=figures["requests"],
        answered=figures["answered"] or 0,
        with_energy=figures["with_energy"] or 0,
        energy_j=energy_j,
        measured_j=measured_j,
        configured_j=None if energy_j is None else max(0.0, energy_j - (measured_j or 0.0)),
        cost=figures["cost"],
        cost_partial=figures["cost_partial"] or 0,
        requests_per_kwh=figures["answered_with_energy"] * _KWH_J / energy_j if energy_j else None,
        joules_per_token=energy_j / tokens if energy_j and tokens else None,
    )
