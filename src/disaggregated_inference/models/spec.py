"""A model's specification, from its config alone: enough to size its KV, route to it or refuse it."""

from typing import Any

import msgspec

from disaggregated_inference.errors import ModelUnsupported
from disaggregated_inference.kv import Fingerprint, KVDType, KVLayout, LayerPlan, Weights
from disaggregated_inference.models.rope import Rope, rope_from_config

ARCHITECTURES = {
    "llama": "SmolLM2, Llama 2 and 3",
    "qwen3": "Qwen3 dense",
    "qwen3_moe": "Qwen3 and Qwen3-Coder mixture of experts",
    "gpt_oss": "GPT-OSS 20B and 120B",
}

_MAX_LAYERS = 10_000


class ModelSpec(msgspec.Struct, frozen=True):
    """Architecture, KV layout and limits."""

    architecture: str
    layout: KVLayout
    context_window: int
    vocabulary: int
    eos_tokens: tuple[int, ...]
    rope: Rope

    def kv_token_bytes(self, dtype: KVDType) -> int:
        return self.layout.token_bytes(dtype)

    def kv_bytes(self, tokens: int, dtype: KVDType) -> int:
        return self.layout.total_bytes(tokens, dtype)

    def fingerprint(self, *, tokenizer: str, chat_template: str, weights: Weights) -> Fingerprint:
        return Fingerprint(
            architecture=self.architecture,
            layout=self.layout,
            rope_frequencies=self.rope.frequencies,
            rope_scale=self.rope.scale,
            vocabulary=self.vocabulary,
            tokenizer=tokenizer,
            chat_template=chat_template,
            weights=weights,
        )


def spec_from_config(config: dict[str, Any]) -> ModelSpec:
    """Read a Hugging Face `config.json`; refuses models whose KV cannot be handed over exactly."""
    architecture = config.get("model_type", "unknown")
    if architecture not in ARCHITECTURES:
        known = "; ".join(f"{name} ({what})" for name, what in ARCHITECTURES.items())
        raise ModelUnsupported(f"architecture {architecture!r} is not supported. Supported: {known}")
    try:
        return _read_spec(architecture, config)
    except KeyError as missing:
        raise ModelUnsupported(f"the config of this {architecture} model lacks {missing}") from missing
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelUnsupported(f"the config of this {architecture} model is invalid: {error}") from error


def _read_spec(architecture: str, config: dict[str, Any]) -> ModelSpec:
    heads = _count(config["num_attention_heads"])
    head_dim = _count(config.get("head_dim") or config["hidden_size"] // heads)
    if head_dim % 2:
        raise ValueError(f"a head size of {head_dim} is odd, RoPE needs pairs")
    layout = KVLayout(
        layers=_layer_plans(architecture, config),
        kv_heads=_count(config.get("num_key_value_heads") or heads),
        head_dim=head_dim,
    )
    eos = config.get("eos_token_id")
    return ModelSpec(
        architecture=architecture,
        layout=layout,
        context_window=_count(config["max_position_embeddings"]),
        vocabulary=_count(config["vocab_size"]),
        eos_tokens=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        rope=rope_from_config(config, head_dim),
    )


def _count(value: Any, most: int = 1 << 31) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
        raise ValueError(f"{str(value)[:40]!r} instead of an integer from 1 to {most}")
    return value


def _layer_plans(architecture: str, config: dict[str, Any]) -> tuple[LayerPlan, ...]:
    count = _count(config["num_hidden_layers"], _MAX_LAYERS)
    if architecture != "gpt_oss":
        if config.get("use_sliding_window"):
            raise ModelUnsupported(
                f"{architecture} with use_sliding_window: MLX ignores it, so completions would differ"
            )
        return (LayerPlan(),) * count
    kinds = config.get("layer_types") or ["sliding_attention", "full_attention"] * (count // 2)
    sliding = LayerPlan(kind="sliding", window=config["sliding_window"])
    return tuple(sliding if kind == "sliding_attention" else LayerPlan() for kind in kinds)
