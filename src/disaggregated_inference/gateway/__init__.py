"""One endpoint that existing programs can use: public APIs over the orchestrator."""

from disaggregated_inference.gateway.key_file import KeyLimits, new_key
from disaggregated_inference.gateway.server import GatewaySettings, run_gateway
from disaggregated_inference.gateway.slo import figures_of, targets

__all__ = ["GatewaySettings", "KeyLimits", "figures_of", "new_key", "run_gateway", "targets"]
