"""Routing, health, failover: one request over two machines. `DisaggregatedInference` is the way in."""

from disaggregated_inference.orchestrator.core import DisaggregatedInference
from disaggregated_inference.orchestrator.legs import Delta

__all__ = ["Delta", "DisaggregatedInference"]
