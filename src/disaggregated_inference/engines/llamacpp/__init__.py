"""llama.cpp's library is loaded here and below, nowhere else."""

from disaggregated_inference.engines.llamacpp.engine import LlamaEngine, load

__all__ = ["LlamaEngine", "load"]
