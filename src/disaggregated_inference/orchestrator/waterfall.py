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
_SMALL_S = 0.001
_REST = "overhead"  # HTTP, planning, and what no node reports


def waterfall(phases: Iterable[Phase], total_s: float) -> tuple[Phase, ...]:
    """One phase at a time, from the request's arrival to its end."""
    bars = [(phase, *_cut(phase, 0.0, total_s)) for phase in phases]
    edges = sorted({0.0, total_s, *(edge for _, *ends in bars for edge in ends)})
    found: list[Phase] = []
    for start_s, end_s in pairwise(edges):
        present = (phase for phase, since_s, until_s in bars if since_s <= start_s and end_s <= until_s)
        phase = min(present, key=lambda each: _ORDER.index(each.name), default=Phase(_REST, 0.0, 0.0))
        if found and (found[-1].name, found[-1].node) == (phase.name, phase.node):
            start_s = found.pop().start_s
        found.append(Phase(phase.name, start_s, end_s - start_s, phase.node))
    return tuple(found)


def phases_of(attempt: Attempt, came_at: float, total_s: float) -> list[Phase]:
    """What is known of an attempt, on the clock of the request."""
    began_s, ended_s = attempt.began_at - came_at, attempt.ended_at - came_at if attempt.ended_at else total_s
    found = _reported(attempt, began_s, ended_s) if attempt.metrics else _broken(attempt, came_at, ended_s)
    cut = ((phase, *_cut(phase, began_s, ended_s)) for phase in found)  # a node may report more than there was
    return [Phase(phase.name, start_s, end_s - start_s, phase.node) for phase, start_s, end_s in cut]


def _cut(phase: Phase, start_s: float, end_s: float) -> tuple[float, float]:
    """Start and end of a phase, within these limits."""
    return min(max(phase.start_s, start_s), end_s), min(max(phase.start_s + phase.seconds, start_s), end_s)


def _broken(attempt: Attempt, came_at: float, ended_s: float) -> list[Phase]:
    """An attempt without a report: what it brought, and then the time until its failure was noticed."""
    at_s, found = attempt.began_at - came_at, list[Phase]()
    if attempt.first_token_at:
        first_s, last_s = attempt.first_token_at - came_at, attempt.last_at - came_at
        found.append(Phase("prefill", at_s, first_s - at_s, attempt.prefill_name))
        found.append(Phase("decode", first_s, last_s - first_s, attempt.route.decode))
        at_s = last_s
    return [*found, Phase("failed", at_s, ended_s - at_s, attempt.failed_node or attempt.route.decode)]


def _reported(attempt: Attempt, began_s: float, ended_s: float) -> list[Phase]:
    """Nodes report durations. The decode node's end at the attempt's end; the prefill node's at the end of computing,
    or begin with the attempt if computing ended before the decode node was free to fetch."""
    metrics, decode, prefill = attempt.metrics, attempt.route.decode, attempt.prefill_name
    assert metrics
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
