"""The orchestrator: routing, health, failover, queueing. `DisaggregatedInference` is the way in."""

from disaggregated_inference.api import Delta, ModelVerdict, Summary
from disaggregated_inference.orchestrator.cluster_view import Route
from disaggregated_inference.orchestrator.defaults import require_defaults
from disaggregated_inference.orchestrator.history import History
from disaggregated_inference.orchestrator.history_energy import (
    energy_by_node,
    energy_sums,
)
from disaggregated_inference.orchestrator.history_reader import HistoryFilter, HistoryReader
from disaggregated_inference.orchestrator.history_series import series
from disaggregated_inference.orchestrator.node_state import NodeState
from disaggregated_inference.orchestrator.orchestrator import DisaggregatedInference
from disaggregated_inference.orchestrator.recorder import FALLBACK_WARNING, OnPlan
from disaggregated_inference.orchestrator.single_machine import comparisons
from disaggregated_inference.orchestrator.summary import RECENT_REQUESTS, is_cached, speedup, summary
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
    "Route",
    "Summary",
    "comparisons",
    "duration_s",
    "energy_by_node",
    "energy_sums",
    "in_thread",
    "is_cached",
    "moment",
    "require_defaults",
    "series",
    "speedup",
    "summary",
    "verdict_of",
]
