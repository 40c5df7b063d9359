"""What a key sees of the cluster. An operator, or everyone where no keys are needed, sees everything; another key sees
the nodes, and of requests its own alone: figures of all could be taken apart into those of others."""

import msgspec
from msgspec import UNSET

from disaggregated_inference.api import ClusterStatus, Summary
from disaggregated_inference.orchestrator import RECENT_REQUESTS, DisaggregatedInference, PlainRecord, summary

_HIDDEN = ("caller", "number")  # fields of a request: who else asks, and how often


def seen_status(status: ClusterStatus, own: str | None) -> ClusterStatus:
    """`own`: whose requests alone are seen; None: all."""
    return status if own is None else msgspec.structs.replace(status, served=UNSET, latency=UNSET)


def seen_request(row: PlainRecord, own: str | None) -> PlainRecord:
    return row if own is None else {name: value for name, value in row.items() if name not in _HIDDEN}


def seen_requests(core: DisaggregatedInference, own: str | None, count: int = RECENT_REQUESTS) -> list[PlainRecord]:
    """Newest first."""
    return [seen_request(row, own) for row in core.history.recent(count, caller=own)]


def seen_summary(core: DisaggregatedInference, own: str | None) -> Summary:
    return summary(core.history.records(RECENT_REQUESTS, caller=own), core.config.names)
