"""The orchestrator: routing, health, failover, queueing. `DisaggregatedInference` is the way in."""

from disaggregated_inference.api import Delta
from disaggregated_inference.orchestrator.cluster_view import Route
from disaggregated_inference.orchestrator.defaults import require_defaults
from disaggregated_inference.orchestrator.history import History
from disaggregated_inference.orchestrator.orchestrator import DisaggregatedInference
from disaggregated_inference.orchestrator.recorder import FALLBACK_WARNING, OnPlan
from disaggregated_inference.orchestrator.threads import in_thread
from disaggregated_inference.orchestrator.verdict import Verdict

__all__ = [
    "FALLBACK_WARNING",
    "Delta",
    "DisaggregatedInference",
    "History",
    "OnPlan",
    "Route",
    "Verdict",
    "in_thread",
    "require_defaults",
]
