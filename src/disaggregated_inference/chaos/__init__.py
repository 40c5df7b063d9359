"""`disagg chaos`: a cluster under random faults, and a check of every answer."""

from disaggregated_inference.chaos.report import ChaosReport, Show
from disaggregated_inference.chaos.run import run_chaos
from disaggregated_inference.chaos.settings import ChaosSettings

__all__ = ["ChaosReport", "ChaosSettings", "Show", "run_chaos"]
