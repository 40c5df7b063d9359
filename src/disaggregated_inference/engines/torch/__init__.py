"""torch and transformers are imported here and below, nowhere else."""

from disaggregated_inference.engines.torch.engine import TorchEngine, load

__all__ = ["TorchEngine", "load"]
