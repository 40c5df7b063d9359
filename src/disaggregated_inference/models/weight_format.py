"""How a model's weights are stored: format, quantization, parameters, size. From the headers of its files alone."""

import math
from contextlib import suppress
from typing import Any, NamedTuple

from disaggregated_inference.errors import DisaggError
from disaggregated_inference.models.gguf import GGUFFile
from disaggregated_inference.models.safetensors import StoredTensor
from disaggregated_inference.models.store import ModelFiles

# Tensors that belong to a quantized one, or are computed: they are no parameters of the model.
_NO_PARAMETERS = (".scales", ".biases", "_scales", "weight_scale", "weight_scale_inv", "input_scale", "inv_freq")
_BLOCKS = "_blocks"  # MXFP4 of GPT-OSS: two values in each byte


class WeightStorage(NamedTuple):
    """Empty and 0: unknown."""

    format: str = ""  # safetensors, gguf or simulated
    quantization: str = ""
    parameters: int = 0
    size_bytes: int = 0


def storage_of(model: ModelFiles) -> WeightStorage:
    """Unknown where the files cannot be read any more: an engine that has them in memory still serves them."""
    with suppress(DisaggError, OSError):
        if model.simulated:
            return WeightStorage("simulated")
        if model.kind == "gguf":
            file = GGUFFile(model.path)
            parameters = sum(math.prod(tensor.shape) for tensor in file.tensors.values())
            return WeightStorage("gguf", _gguf_quantization(file), parameters, model.size_bytes)
        tensors, settings = model.tensors(), model.config.get("quantization") or {}
        parameters = sum(_parameters(tensor, settings) for tensor in tensors)
        return WeightStorage("safetensors", _quantization(model, tensors), parameters, model.size_bytes)
    return WeightStorage()


def _gguf_quantization(file: GGUFFile) -> str:
    """As its file type names it (Q4_K_M), or the type of most of its bytes."""
    import gguf

    with suppress(KeyError, ValueError):
        name: str = gguf.LlamaFileType(file.metadata["general.file_type"]).name
        return name.removeprefix("MOSTLY_").removeprefix("ALL_")
    return _most([(tensor.type_name, tensor.size_bytes) for tensor in file.tensors.values()])


def _quantization(model: ModelFiles, tensors: list[StoredTensor]) -> str:
    """MLX gives the bits of a weight; other methods have a name."""
    settings = model.config.get("quantization")
    if model.quantization == "mlx" and isinstance(settings, dict):
        mode = str(settings.get("mode") or "affine")
        return f"{settings.get('bits')}-bit" if mode == "affine" else mode.upper()
    return model.quantization.upper() or _most([(tensor.dtype, len(tensor.data)) for tensor in tensors])


def _most(sizes: list[tuple[str, int]]) -> str:
    total: dict[str, int] = {}
    for kind, size in sizes:
        total[kind] = total.get(kind, 0) + size
    return max(total, key=lambda kind: total[kind], default="")


def _parameters(tensor: StoredTensor, settings: dict[str, Any]) -> int:
    """`settings`: of MLX, which packs values into 32 bits; a layer may have its own."""
    if tensor.name.endswith(_NO_PARAMETERS):
        return 0
    count = math.prod(tensor.shape)
    if tensor.dtype == "U32":
        own = settings.get(tensor.name.removesuffix(".weight"))
        bits = (own if isinstance(own, dict) else settings).get("bits")
        return count * 32 // bits if isinstance(bits, int) and bits > 0 else count
    return count * 2 if tensor.name.endswith(_BLOCKS) else count
