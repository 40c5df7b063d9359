"""What the requests of the history would have taken on one machine alone: its measured rates and its watts.

An estimate for each pair of machines that served together. What is not known stays None, with the reason. Requests that
ran at once shared a machine: its seconds count once, not once for each of them.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from disaggregated_inference.api import Rate
from disaggregated_inference.orchestrator.history_reader import HistoryFilter, HistoryReader
from disaggregated_inference.orchestrator.router import nearest_rate

_HOUR_S, _KWH_J = 3600.0, 3.6e6
_NEAR = 4  # times the size of the work whose rate is taken: small work is slower, and would make "alone" look bad
_PAIR = "json_array(model, prefill_node, decode_node)"
_COLUMNS = {
    "requests": "COUNT(*)",
    "computed": "SUM(MAX(0, prompt_tokens - COALESCE(cached_tokens, 0)))",
    "completion_tokens": "SUM(completion_tokens)",
    "prefill_s": "SUM(COALESCE(prefill_machine_time, prefill_time))",  # of the machine
    "decode_s": "SUM(COALESCE(decode_machine_time, decode_time))",
    "answers_s": "SUM(decode_time)",
    "energy_j": "CASE WHEN COUNT(energy_j) = COUNT(*) THEN SUM(energy_j) END",
}


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Of one node: the rates that it measured, its watts with and without work, its price. None: unknown."""

    prefill_rates: tuple[Rate, ...] = ()
    decode_rates: tuple[Rate, ...] = ()
    busy_w: float | None = None
    idle_w: float | None = None
    price_per_hour: float | None = None


class MachineComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that two machines served together, beside the same requests on one of them, the other one switched off.
    `together_s` is the time in which at least one of them ran; `alone_s` the least time in which the one machine could
    compute them, in batches as large as they were. `idle_included`: `together_j` contains what each machine draws while
    it waits for the other. Costs are those of the energy and of the machines for these seconds."""

    model: str
    machine: Literal["decode", "prefill"]
    node: str
    requests: int
    together_s: float
    together_j: float | None
    together_cost: float | None = None
    idle_included: bool
    batch_size: float  # mean number of answers that were written at once
    alone_s: float | None = None
    alone_j: float | None = None
    alone_cost: float | None = None
    why: str = ""


def comparisons(
    reader: HistoryReader,
    wanted: HistoryFilter,
    facts: Mapping[str, MachineFacts],
    price_per_kwh: float | None = None,
) -> list[MachineComparison]:
    handed_over = msgspec.structs.replace(wanted, kind="disaggregated", outcome="ok")
    groups = reader.grouped(handed_over, _PAIR, _COLUMNS)
    busy_s = reader.busy_seconds(handed_over, _PAIR)
    return [
        each
        for pair, sums in groups.items()
        for each in _compare(msgspec.json.decode(pair), sums | {"wall_s": busy_s.get(pair, 0.0)}, facts, price_per_kwh)
    ]


def _compare(
    pair: tuple[str, str, str],
    sums: dict[str, Any],
    facts: Mapping[str, MachineFacts],
    price_per_kwh: float | None,
) -> Iterator[MachineComparison]:
    model, prefill, decode = pair
    one, other = facts.get(prefill, MachineFacts()), facts.get(decode, MachineFacts())
    idle_j, wall_s, energy_j = _idle_j(one, other, sums), sums["wall_s"], sums["energy_j"]
    together_j = None if energy_j is None else energy_j + (idle_j or 0.0)
    batch = sums["answers_s"] / sums["decode_s"] if sums["decode_s"] else 1.0
    usual: dict[str, Any] = {
        "model": model,
        "requests": sums["requests"],
        "together_s": wall_s,
        "together_j": together_j,
        "together_cost": _cost(wall_s, together_j, price_per_kwh, one, other),
        "idle_included": idle_j is not None,
        "batch_size": batch,
    }
    tokens = max(1, round(sums["computed"] / sums["requests"]))
    read_s = _seconds(other.prefill_rates, tokens, sums["computed"])
    usual["machine"], usual["node"] = "decode", decode
    yield _alone(usual, other, read_s, sums["decode_s"], f"prefill rate at {tokens} tokens", price_per_kwh)
    written_s = _seconds(one.decode_rates, round(batch), sums["completion_tokens"])
    usual["machine"], usual["node"] = "prefill", prefill
    yield _alone(usual, one, written_s, sums["prefill_s"], f"decode rate at {batch:.1f} answers", price_per_kwh)


def _alone(
    usual: dict[str, Any],
    machine: MachineFacts,
    more_s: float | None,
    own_s: float,
    what: str,
    price_per_kwh: float | None,
) -> MachineComparison:
    if more_s is None:
        return MachineComparison(**usual, why=f"{usual['node']} has not measured its {what}")
    busy_s = own_s + more_s
    alone_j = None if machine.busy_w is None else machine.busy_w * busy_s
    why = "" if machine.busy_w is not None else f"{usual['node']} has no meter, and the config no power_w for it"
    cost = _cost(busy_s, alone_j, price_per_kwh, machine)
    return MachineComparison(**usual, alone_s=busy_s, alone_j=alone_j, alone_cost=cost, why=why)


def _cost(seconds: float, energy_j: float | None, price_per_kwh: float | None, *machines: MachineFacts) -> float | None:
    """Only where all of it is known."""
    prices = [machine.price_per_hour for machine in machines]
    if energy_j is None or price_per_kwh is None or None in prices:
        return None
    return sum(price or 0.0 for price in prices) * seconds / _HOUR_S + energy_j / _KWH_J * price_per_kwh


def _idle_j(prefill: MachineFacts, decode: MachineFacts, sums: dict[str, Any]) -> float | None:
    if prefill.idle_w is None or decode.idle_w is None:
        return None
    waits_s = [max(0.0, float(sums["wall_s"]) - float(sums[name])) for name in ("prefill_s", "decode_s")]
    return prefill.idle_w * waits_s[0] + decode.idle_w * waits_s[1]


def _seconds(rates: tuple[Rate, ...], size: int, tokens: int) -> float | None:
    """At the rate of the nearest size; None: there is none that is near, or larger."""
    nearest = nearest_rate(rates, size)
    return tokens / nearest.tokens_per_s if nearest and _NEAR * max(nearest.size, 1) >= size else None
