"""The orchestrator: routing, health, failover, queueing. `DisaggregatedInference` is the way in."""

from disaggregated_inference.api import FALLBACK_WARNING, Delta, ModelVerdict, Summary
from disaggregated_inference.orchestrator.cluster_view import Route
from disaggregated_inference.orchestrator.defaults import require_defaults
from disaggregated_inference.orchestrator.history import History
from disaggregated_inference.orchestrator.history_energy import (
    energy_by_node,
    energy_sums,
)
from disaggregated_inference.orchestrator.history_reader import HistoryFilter, HistoryReader
from disaggregated_inference.orchestrator.history_record import PlainRecord
from disaggregated_inference.orchestrator.history_series import series
from disaggregated_inference.orchestrator.history_table import cost_is_partial, longest_stall_s
from disaggregated_inference.orchestrator.node_state import NodeState
from disaggregated_inference.orchestrator.orchestrator import DisaggregatedInference
from disaggregated_inference.orchestrator.recorder import OnPlan
from disaggregated_inference.orchestrator.single_machine import comparisons
from disaggregated_inference.orchestrator.summary import (
    RECENT_REQUESTS,
    TimedRequest,
    is_cached,
    span,
    speedup,
    summary,
)
from disaggregated_inference.orchestrator.threads import in_thread
from disaggregated_inference.orchestrator.time_parsing import DURATION_SHAPE, MOMENT_SHAPE, duration_s, moment
from disaggregated_inference.orchestrator.verdict import verdict_of
from disaggregated_inference.orchestrator.waterfall import WAITING_PHASES

__all__ = [
    "DURATION_SHAPE",
    "FALLBACK_WARNING",
    "MOMENT_SHAPE",
    "RECENT_REQUESTS",
    "WAITING_PHASES",
    "Delta",
    "DisaggregatedInference",
    "History",
    "HistoryFilter",
    "HistoryReader",
    "ModelVerdict",
    "NodeState",
    "OnPlan",
    "PlainRecord",
    "Route",
    "Summary",
    "TimedRequest",
    "comparisons",
    "cost_is_partial",
    "duration_s",
    "energy_by_node",
    "energy_sums",
    "in_thread",
    "is_cached",
    "longest_stall_s",
    "moment",
    "require_defaults",
    "series",
    "span",
    "speedup",
    "summary",
    "verdict_of",
]
