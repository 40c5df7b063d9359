"""Loads a model folder into mlx-lm: corrects configs that it would misread, renames dense GPT-OSS weights."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import _get_classes, load_model

from disaggregated_inference.engines.mlx.caches import MLX_DTYPES
from disaggregated_inference.kv import KVDType
from disaggregated_inference.models import ModelFiles, rope_parameters


def load_weights(model: ModelFiles, dtype: KVDType) -> Any:
    """The mlx-lm model with its floating-point weights in `dtype`; quantized ones stay as they are."""
    loaded, _ = load_model(
        model.path, lazy=True, model_config=readable_config(model.config), get_model_classes=_classes
    )
    loaded.update(tree_map(lambda weight: _cast(weight, MLX_DTYPES[dtype]), loaded.parameters()))
    mx.eval(loaded.parameters())
    loaded.eval()
    return loaded


def readable_config(config: dict[str, Any]) -> dict[str, Any]:
    """The settings that mlx-lm does not find in configs saved by transformers 5."""
    rope = rope_parameters(config)
    readable: dict[str, Any] = {"rope_theta": rope["rope_theta"]}
    if (rope.get("rope_type") or rope.get("type") or "default") != "default":
        readable["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    if "num_experts" not in config and "num_local_experts" in config:
        readable["num_experts"] = config["num_local_experts"]
    return readable


def activation_dtype(model: Any) -> KVDType:
    """The model's compute dtype: that of its norms, which are never quantized."""
    weight = dict(tree_flatten(model.parameters()))["model.norm.weight"]
    return next(name for name, kind in MLX_DTYPES.items() if kind == weight.dtype)


def _cast(weight: mx.array, dtype: Any) -> mx.array:
    floating = weight.dtype in (mx.bfloat16, mx.float16, mx.float32)
    return weight.astype(dtype) if floating else weight


def _classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
    """mlx-lm's classes; GPT-OSS also accepts the dense layout that transformers saves."""
    model_class, arguments = _get_classes(config)
    if config["model_type"] != "gpt_oss":
        return model_class, arguments

    class DenseGptOss(model_class):  # type: ignore[valid-type, misc]
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            return super().sanitize(_split_dense_experts(weights))

    return DenseGptOss, arguments


def _split_dense_experts(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """`gate_up_proj` [experts, in, 2 x out], interleaved, becomes `gate_proj` and `up_proj` [experts, out, in]."""
    renamed: dict[str, mx.array] = {}
    for name, weight in weights.items():
        stem, _, part = name.rpartition(".")
        if part == "gate_up_proj":
            renamed[f"{stem}.gate_proj.weight"] = mx.contiguous(weight.swapaxes(1, 2)[:, 0::2])
            renamed[f"{stem}.up_proj.weight"] = mx.contiguous(weight.swapaxes(1, 2)[:, 1::2])
        elif part == "down_proj" and weight.ndim == 3:
            renamed[f"{stem}.down_proj.weight"] = mx.contiguous(weight.swapaxes(1, 2))
        elif part == "gate_up_proj_bias" and f"{stem}.gate_up_proj" in weights:
            renamed[f"{stem}.gate_proj.bias"] = mx.contiguous(weight[:, 0::2])
            renamed[f"{stem}.up_proj.bias"] = mx.contiguous(weight[:, 1::2])
        elif part == "down_proj_bias" and f"{stem}.down_proj" in weights:
            renamed[f"{stem}.down_proj.bias"] = weight
        else:
            renamed[name] = weight
    return renamed
