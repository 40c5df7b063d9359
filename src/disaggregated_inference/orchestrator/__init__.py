"""Routing, health, failover: one request over two machines. `DisaggregatedInference` is the way in."""

from disaggregated_inference.orchestrator.core import Delta, DisaggregatedInference

__all__ = ["Delta", "DisaggregatedInference"]
