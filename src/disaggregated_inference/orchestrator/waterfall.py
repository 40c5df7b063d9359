"""The waterfall of a request: every moment of it belongs to one phase, so the phases add up to the total."""

from collections.abc import Iterable
from itertools import pairwise

from disaggregated_inference.api import Phase
from disaggregated_inference.orchestrator.attempt import Attempt

# Where phases overlap, the first of these is shown: a decode node makes ready while the prefill node computes, and
# several choices may run at once.
_ORDER = (
    "decode",
    "exposed transfer",
    "prefill",
    "load",
    "prefill queue",
    "canary",
    "admission",
    "failed",
    "tokenize",
    "queue",
)
WAITING_PHASES = ("queue", "admission", "prefill queue")  # without work for the request
_RANKS = {name: rank for rank, name in enumerate(_ORDER)}
_SMALL_S = 0.001
_NOTHING = Phase("overhead", 0.0, 0.0)  # HTTP, planning, and what no node reports

_Bar = tuple[float, float, Phase]  # start, end


def waterfall(phases: Iterable[Phase], total_s: float) -> tuple[Phase, ...]:
    """One phase at a time, from the request's arrival to its end."""
    bars = [(*_cut(phase, 0.0, total_s), phase) for phase in phases]
    bars.sort(key=_rank)
    edges = {0.0, total_s}
    for since_s, until_s, _ in bars:
        edges.add(since_s)
        edges.add(until_s)
    found: list[Phase] = []
    last = _NOTHING
    for start_s, end_s in pairwise(sorted(edges)):
        phase = _shown(bars, start_s, end_s)
        if found and last.name == phase.name and last.node == phase.node:
            start_s = found.pop().start_s
        last = Phase(phase.name, start_s, end_s - start_s, phase.node)
        found.append(last)
    return tuple(found)


def _rank(bar: _Bar) -> int:
    return _RANKS[bar[2].name]


def _shown(bars: list[_Bar], start_s: float, end_s: float) -> Phase:
    """The first of the bars that covers this time."""
    for since_s, until_s, phase in bars:
        if since_s <= start_s and end_s <= until_s:
            return phase
    return _NOTHING


def phases_of(attempt: Attempt, came_at: float, total_s: float) -> list[Phase]:
    """What is known of an attempt, on the clock of the request."""
    began_s, ended_s = attempt.began_at - came_at, attempt.ended_at - came_at if attempt.ended_at else total_s
    first_s = attempt.first_token_at - came_at if attempt.first_token_at else ended_s
    found = _reported(attempt, began_s, ended_s, first_s) if attempt.metrics else _broken(attempt, came_at, ended_s)
    cut = ((phase, *_cut(phase, began_s, ended_s)) for phase in found)  # a node may report more than there was
    return [Phase(phase.name, start_s, end_s - start_s, phase.node) for phase, start_s, end_s in cut]


def _cut(phase: Phase, start_s: float, end_s: float) -> tuple[float, float]:
    """Start and end of a phase, within these limits."""
    since_s = phase.start_s
    until_s = since_s + phase.seconds
    since_s = start_s if since_s < start_s else since_s
    until_s = start_s if until_s < start_s else until_s
    return end_s if since_s > end_s else since_s, end_s if until_s > end_s else until_s


def _broken(attempt: Attempt, came_at: float, ended_s: float) -> list[Phase]:
    """An attempt without a report: what it brought, and then the time until its failure was noticed."""
    at_s, found = attempt.began_at - came_at, list[Phase]()
    if attempt.first_token_at:
        first_s, last_s = attempt.first_token_at - came_at, attempt.last_at - came_at
        found.append(Phase("prefill", at_s, first_s - at_s, attempt.prefill_name))
        found.append(Phase("decode", first_s, last_s - first_s, attempt.route.decode))
        at_s = last_s
    return [*found, Phase("failed", at_s, ended_s - at_s, attempt.failed_node or attempt.route.decode)]


def _reported(attempt: Attempt, began_s: float, ended_s: float, first_s: float) -> list[Phase]:
    """Nodes report durations. The decode node's end at the attempt's end, or earlier if the prompt would be read only
    after the first token came; the prefill node's at the end of computing, or begin with the attempt if computing ended
    before the decode node was free to fetch."""
    metrics, decode, prefill = attempt.metrics, attempt.route.decode, attempt.prefill_name
    assert metrics
    ended_s = min(ended_s, first_s + metrics.exposed_transfer_time + metrics.decode_time)
    ready_s = ended_s - metrics.decode_time
    computed_s, arrived_s = ready_s - metrics.exposed_transfer_time, ended_s - metrics.total_time
    if attempt.route.prefill and computed_s <= arrived_s + metrics.admission_time + metrics.canary_time + _SMALL_S:
        computed_s = min(computed_s, began_s + metrics.queue_time + metrics.prefill_time)
    read_s = computed_s - metrics.prefill_time
    return [
        Phase("admission", arrived_s, metrics.admission_time, decode),
        Phase("canary", arrived_s + metrics.admission_time, metrics.canary_time, decode),
        Phase("prefill queue", read_s - metrics.load_time - metrics.queue_time, metrics.queue_time, prefill),
        Phase("load", read_s - metrics.load_time, metrics.load_time, prefill),
        Phase("prefill", read_s, metrics.prefill_time, prefill),
        Phase("exposed transfer", ready_s - metrics.exposed_transfer_time, metrics.exposed_transfer_time, decode),
        Phase("decode", ready_s, metrics.decode_time, decode),
    ]
