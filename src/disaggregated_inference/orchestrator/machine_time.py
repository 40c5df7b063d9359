"""The machines' time of a request: its share of what they computed at once, and what it would have taken by itself.

A batch reads the weights once for all its answers. So the seconds of requests that ran at once may not be added up:
neither as the time of a machine, nor as what the requests would have taken one after the other.
"""

from collections.abc import Callable, Sequence

import msgspec

from disaggregated_inference.api import Rate, Rates, RequestRecord
from disaggregated_inference.orchestrator.energy import PhaseShare
from disaggregated_inference.orchestrator.router import nearest_rate
from disaggregated_inference.orchestrator.waterfall import WAITING_PHASES

RatesOf = Callable[[str], Rates]  # by name of the node
_ALONE = 1.02  # answers per step of a request that shared it with no other


def no_rates(node: str) -> Rates:
    return Rates()


def with_machine_times(record: RequestRecord, shares: Sequence[PhaseShare], rates: RatesOf) -> RequestRecord:
    """`shares`: of the power logs, for nodes that tell nothing better."""
    if not record.decode_node or not record.first_token_time:
        return record
    prefill_s, decode_s = _prefill_s(record, shares, rates), _decode_s(record, shares)
    waited_s = sum(phase.seconds for phase in record.waterfall if phase.name in WAITING_PHASES)
    by_others_s = record.prefill_time - prefill_s + record.decode_time - _decode_alone_s(record, decode_s, rates)
    by_others_s += _exposed_by_others_s(record)
    return msgspec.structs.replace(
        record,
        prefill_machine_time=prefill_s,
        decode_machine_time=decode_s,
        sequential_time=min(record.total_time, max(0.0, record.total_time - waited_s - by_others_s)),
    )


def _prefill_s(record: RequestRecord, shares: Sequence[PhaseShare], rates: RatesOf) -> float:
    """By the rate that the node measured at single prompts: it works on several in turn."""
    found = rates(record.prefill_node or "")
    local = record.prefill_node == record.decode_node
    rate = nearest_rate(found.local_prefill if local else found.prefill, record.prompt_tokens)
    if rate is None or not record.prefill_speed:
        return min(record.prefill_time, _share_s(shares, "prefill", record.prefill_time))
    return min(record.prefill_time, record.prefill_speed * record.prefill_time / rate.tokens_per_s)


def _decode_s(record: RequestRecord, shares: Sequence[PhaseShare]) -> float:
    if not record.batch_size:
        return min(record.decode_time, _share_s(shares, "decode", record.decode_time))
    return record.decode_time * min(1.0, record.n / record.batch_size)


def _decode_alone_s(record: RequestRecord, shared_s: float, rates: RatesOf) -> float:
    """At the rate of a batch of the request's own choices; where that was not measured, its share: too little, so that
    no speedup is too high."""
    if (record.batch_size or 0.0) <= _ALONE * record.n:
        return shared_s
    rate = _rate_of(rates(record.decode_node or "").decode, record.n)
    tokens = record.completion_tokens - record.n
    return min(record.decode_time, max(shared_s, tokens / rate.tokens_per_s)) if rate else shared_s


def _exposed_by_others_s(record: RequestRecord) -> float:
    """The exposed transfer, without the seconds in which its own KV arrived or was placed: then it waited for other
    transfers, or for the engine."""
    if not record.transfer_time:
        return 0.0
    own_s = record.transfer_time - (record.hidden_transfer_time or 0.0) + (record.inject_time or 0.0)
    return max(0.0, (record.exposed_transfer_time or 0.0) - own_s)


def _rate_of(rates: Sequence[Rate], size: int) -> Rate | None:
    """Of exactly this size of a batch, in powers of two."""
    return next((rate for rate in rates if rate.size <= size < 2 * rate.size and rate.tokens_per_s > 0), None)


def _share_s(shares: Sequence[PhaseShare], phase: str, otherwise_s: float) -> float:
    found = [share.seconds for share in shares if share.phase == phase]
    return sum(found) if found else otherwise_s
