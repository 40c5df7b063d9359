"""What TLS and the authenticated mode add to a hand-over: simulated nodes that compute nothing, through an
orchestrator, as in a cluster. Requests to the pairs alternate."""

import asyncio
import logging

from disaggregated_inference.bench.machines import Machine, greedy, random_prompt, simulated
from disaggregated_inference.bench.report import Report, Row
from disaggregated_inference.local_nodes import running
from disaggregated_inference.orchestrator import DisaggregatedInference

_PROMPT = 512
_MOST_MS = 3.0
_MODES = {"plain": (), "authenticated": ("--kv-security", "authenticated"), "TLS": ("--kv-security", "tls")}


def add_handover(report: Report, identity: str, rounds: int) -> None:
    logging.getLogger("disaggregated_inference.orchestrator").setLevel(logging.ERROR)  # not a line for every node
    machines = {mode: _pair(mode, options, identity) for mode, options in _MODES.items()}
    with running([machine for pair in machines.values() for machine in pair]):
        times = asyncio.run(_first_tokens(machines, identity, rounds))
    best = {mode: min(seconds) * 1e3 for mode, seconds in times.items()}
    report.add(Row("first token, plain", best["plain"], "ms"))
    for mode in ("authenticated", "TLS"):
        report.add(Row(f"first token, added by {mode}", best[mode] - best["plain"], "ms", goal=_MOST_MS, at_most=True))


def _pair(mode: str, options: tuple[str, ...], identity: str) -> tuple[Machine, Machine]:
    who = ("--identity", identity) if options else ()
    shared = ("--prefix-memory", "0", *who)
    return (
        simulated(f"prefill, {mode}", "prefill", "tiny", "instant", *shared, *options),
        simulated(f"decode, {mode}", "decode", "tiny", "instant", *shared),
    )


async def _first_tokens(
    machines: dict[str, tuple[Machine, Machine]], identity: str, rounds: int
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {mode: [] for mode in machines}
    clusters = {mode: DisaggregatedInference(_config(mode, pair, identity)) for mode, pair in machines.items()}
    try:
        for number in range(-2, rounds):  # two rounds of warm-up, with the peer checks
            for mode, cluster in clusters.items():
                seconds = await _first_token(cluster, number)
                if number >= 0:
                    times[mode].append(seconds)
    finally:
        for cluster in clusters.values():
            await cluster.aclose()
    return times


def _config(mode: str, pair: tuple[Machine, Machine], identity: str) -> dict[str, object]:
    tls = {"tls": mode != "plain"}
    servers = {f"{machine.role}_servers": [machine.entry | tls] for machine in pair}
    return servers | {"identity": identity, "policies": {"local": "never"}}


async def _first_token(cluster: DisaggregatedInference, number: int) -> float:
    completion = await cluster.complete(**greedy(random_prompt(number, _PROMPT), 2))
    assert completion.record.handed_over, completion.record
    return completion.record.first_token_time
