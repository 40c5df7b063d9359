"""Energy and cost of a request, computed when it has ended: from the power that its nodes measured, else from the watts
of the cluster file.

A request gets its share of a machine: at every moment the power is divided by the requests for which the nodes of that
machine compute. A machine is what one `host` of the cluster file names; each simulated node is one of its own.
"""

import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from disaggregated_inference.api import EnergyShare, EnergySource, NodeStatus, Phase, RequestRecord
from disaggregated_inference.cluster import Policies, Server
from disaggregated_inference.timeouts import OrchestratorTimeouts

_MAX_SAMPLES = 900  # of a node: 15 minutes at the usual pace of polling
_PIECE_S, _MAX_PIECES = 1.0, 64  # a phase is integrated in pieces of this length, or in so many
_SAME_S = 0.01  # a reading that an earlier status had already
_WORK = ("prefill", "decode")  # phases of a waterfall in which an engine computes for the request
_HOUR_S, _YEAR_H = 3600.0, 8766.0

MeterSource = Literal["measured", "configured"]


class PowerSample(msgspec.Struct, frozen=True):
    at: float  # on the monotonic clock
    power_w: float | None  # None: the node has no meter
    working: int  # requests that it computed for


class PowerLog:
    """The power and the work of one node, as its statuses told them. A sample that is further away than `near_s` says
    nothing of a moment."""

    def __init__(self, near_s: float = OrchestratorTimeouts().power_sample_s) -> None:
        self._near_s = near_s
        self._all: list[PowerSample] = []
        self._busy: list[PowerSample] = []  # those with power and work
        self.has_meter = False  # the node has told its power at least once

    def __len__(self) -> int:
        """Samples that it holds in memory."""
        return len(self._all) + len(self._busy)

    def add(self, status: NodeStatus, now: float | None = None) -> None:
        readings, now = status.readings, time.monotonic() if now is None else now
        at = now - readings.age_s if readings else now
        if self._all and at < self._all[-1].at + _SAME_S:
            return
        self.has_meter = self.has_meter or (readings is not None and readings.power_w is not None)
        sample = PowerSample(at, readings.power_w if readings else None, status.working)
        for samples in (self._all, self._busy):
            if samples is self._all or (sample.working and sample.power_w is not None):
                samples.append(sample)
                del samples[:-_MAX_SAMPLES]

    def mean_busy_w(self) -> float | None:
        """Of the samples in which the node worked; None: it has no meter, or has not worked."""
        return sum(sample.power_w or 0.0 for sample in self._busy) / len(self._busy) if self._busy else None

    def near(self, at: float) -> PowerSample | None:
        found = _nearest(self._all, at)
        return found if found and abs(found.at - at) <= self._near_s else None

    def power_w(self, at: float) -> float | None:
        """At a moment at which the node worked. A sample of an idle moment would tell too little of a request that was
        shorter than the pace of the samples: then the nearest sample of a busy one counts."""
        near = self.near(at)
        if near is None or near.power_w is None or near.working:
            return near.power_w if near else None
        return (_nearest(self._busy, at) or near).power_w


def _nearest(samples: Sequence[PowerSample], at: float) -> PowerSample | None:
    place = bisect_left(samples, at, key=lambda sample: sample.at)
    return min(samples[max(0, place - 1) : place + 1], key=lambda sample: abs(sample.at - at), default=None)


class PhaseShare(msgspec.Struct, frozen=True, kw_only=True):
    """What a request had of a machine in one phase. `joules` None: unknown."""

    server: Server
    phase: str
    seconds: float  # of the machine's time
    joules: float | None
    source: MeterSource


class Meters:
    """The power logs of all nodes, by name."""

    def __init__(self, servers: Iterable[Server], logs: Mapping[str, PowerLog]) -> None:
        self._servers = {server.name: server for server in servers}
        self._logs = {name: log for name, log in logs.items() if name in self._servers}

    def shares(self, phases: Iterable[Phase], came_at: float) -> list[PhaseShare]:
        """Of the phases in which nodes computed. `came_at`: when the request came, on the monotonic clock. None where
        nothing is known of their machines: neither power nor price."""
        work = [phase for phase in phases if phase.name in _WORK and phase.node in self._servers]
        if not any(self._is_known(self._servers[phase.node]) for phase in work):
            return []
        return [self._share(self._servers[phase.node], phase, came_at + phase.start_s) for phase in work]

    def _is_known(self, server: Server) -> bool:
        log = self._logs.get(server.name)
        return server.power_w is not None or (log is not None and log.has_meter) or price_per_hour(server) is not None

    def _share(self, server: Server, phase: Phase, start: float) -> PhaseShare:
        pieces = max(1, min(_MAX_PIECES, round(phase.seconds / _PIECE_S)))
        piece_s, log = phase.seconds / pieces, self._logs.get(server.name)
        middles = [start + (number + 0.5) * piece_s for number in range(pieces)]
        seconds = [piece_s / self._requests_at(_machine(server), at) for at in middles]
        watts = [None if log is None else log.power_w(at) for at in middles]
        measured = None not in watts
        if not measured:
            watts = [server.power_w] * pieces
        joules = None if None in watts else sum((w or 0.0) * s for w, s in zip(watts, seconds, strict=True))
        source: MeterSource = "measured" if measured else "configured"
        return PhaseShare(server=server, phase=phase.name, seconds=sum(seconds), joules=joules, source=source)

    def _requests_at(self, machine: str, at: float) -> int:
        """That the nodes of a machine computed for; at least the one that is asked for."""
        samples = [log.near(at) for name, log in self._logs.items() if _machine(self._servers[name]) == machine]
        return max(1, sum(sample.working for sample in samples if sample))


def _machine(server: Server) -> str:
    return f"simulated {server.name}" if server.engine == "simulated" else server.host


def with_energy(record: RequestRecord, shares: Sequence[PhaseShare], policies: Policies) -> RequestRecord:
    """The record with energy and cost, as far as they are known."""
    if not shares:
        return record
    known = [
        EnergyShare(node=share.server.name, phase=share.phase, joules=share.joules, source=share.source)
        for share in shares
        if share.joules is not None
    ]
    energy_j = sum(share.joules for share in known) if len(known) == len(shares) else None
    return msgspec.structs.replace(
        record,
        energy=tuple(known),
        energy_j=energy_j,
        energy_wh=None if energy_j is None else energy_j / _HOUR_S,
        energy_source=None if energy_j is None else _source(known),
        **_cost(shares, energy_j, policies.electricity_price_per_kwh),
    )


def _source(shares: Sequence[EnergyShare]) -> EnergySource:
    sources = {share.source for share in shares}
    return "mixed" if len(sources) > 1 else sources.pop()


def _cost(shares: Sequence[PhaseShare], energy_j: float | None, price_per_kwh: float | None) -> dict[str, Any]:
    """The machines' prices for the time of the request, and the price of its energy: as far as they are known, with
    what is left out. None: nothing is known."""
    prices = [(share, price_per_hour(share.server)) for share in shares]
    parts = [price * share.seconds / _HOUR_S for share, price in prices if price is not None]
    without = [f"price of {share.server.name}" for share, price in prices if price is None]
    if energy_j is not None and price_per_kwh is not None:
        parts.append(energy_j / _HOUR_S / 1000 * price_per_kwh)
    else:
        without.append("energy" if energy_j is None else "electricity price")
    return {"cost": sum(parts), "cost_without": tuple(dict.fromkeys(without))} if parts else {}


def price_per_hour(server: Server) -> float | None:
    """Of a machine: as the config has it, or its price spread over its life."""
    if server.price_per_hour is not None or server.price is None:
        return server.price_per_hour
    return server.price / (server.lifetime_years * _YEAR_H)
