"""Models on disk: names, files, specifications, hashes and tokenizers. No torch, no MLX."""

from disaggregated_inference.models.missing_tokenizer import MissingTokenizer
from disaggregated_inference.models.name_matching import is_same_model
from disaggregated_inference.models.registered_names import FileKind, bare_name
from disaggregated_inference.models.rope import Rope, llamacpp_rope, rope_from_config, rope_parameters
from disaggregated_inference.models.simulated import FIRST_WORD, SIMULATED_MODELS, SPECIAL_TOKENS
from disaggregated_inference.models.spec import ARCHITECTURES, ModelSpec, spec_from_config
from disaggregated_inference.models.store import ENGINE_FILES, ModelFiles, ModelStore, default_home
from disaggregated_inference.models.tokenizer import ModelTokenizer
from disaggregated_inference.models.verify import ModelDescription, compare_models, describe_model, describe_models
from disaggregated_inference.models.weight_format import WeightStorage, storage_of

__all__ = [
    "ARCHITECTURES",
    "ENGINE_FILES",
    "FIRST_WORD",
    "SIMULATED_MODELS",
    "SPECIAL_TOKENS",
    "FileKind",
    "MissingTokenizer",
    "ModelDescription",
    "ModelFiles",
    "ModelSpec",
    "ModelStore",
    "ModelTokenizer",
    "Rope",
    "WeightStorage",
    "bare_name",
    "compare_models",
    "default_home",
    "describe_model",
    "describe_models",
    "is_same_model",
    "llamacpp_rope",
    "rope_from_config",
    "rope_parameters",
    "spec_from_config",
    "storage_of",
]
