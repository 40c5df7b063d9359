"""Models on disk: names, files, what they are, and their tokenizers. No torch, no MLX."""

from disaggregated_inference.models.spec import ARCHITECTURES, ModelSpec, spec_from_config
from disaggregated_inference.models.store import ModelFiles, ModelStore
from disaggregated_inference.models.tokenizer import ModelTokenizer

__all__ = ["ARCHITECTURES", "ModelFiles", "ModelSpec", "ModelStore", "ModelTokenizer", "spec_from_config"]
