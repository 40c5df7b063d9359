"""Routing, health, failover: one request over two machines. `DisaggregatedInference` is the way in."""

from disaggregated_inference.orchestrator.node_client import Delta
from disaggregated_inference.orchestrator.orchestrator import DisaggregatedInference

__all__ = ["Delta", "DisaggregatedInference"]
