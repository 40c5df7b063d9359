"""The import name that existing programs use."""

from disaggregated_inference.client import DisaggregatedClient

__all__ = ["DisaggregatedClient"]
