"""The simulated engine: no weights, only a machine's timing and real KV bytes. Never called inference."""

from disaggregated_inference.engines.simulated.engine import SimulatedEngine, load
from disaggregated_inference.engines.simulated.profiles import MACHINES, Profile, line_gbps, parse_profile

__all__ = ["MACHINES", "Profile", "SimulatedEngine", "line_gbps", "load", "parse_profile"]
