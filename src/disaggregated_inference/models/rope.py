"""The RoPE frequencies of a model's config: the reference for every engine.

KV is portable only between engines with the same RoPE, and engines silently deviate (mlx-lm reads a newer config's base
as 10000 and rounds GPT-OSS's YaRN range against its checkpoint). So the frequencies are computed here.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disaggregated_inference.errors import ModelUnsupported

Frequencies = NDArray[np.float64]


class Rope(NamedTuple):
    """The angle per position of each rotated pair, and the factor for cos and sin."""

    frequencies: tuple[float, ...]
    scale: float


def rope_from_config(config: dict[str, Any], head_dim: int) -> Rope:
    """Accepts both spellings: `rope_theta` + `rope_scaling`, and the newer `rope_parameters`."""
    parameters = rope_parameters(config)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in _KINDS:
        raise ModelUnsupported(f"RoPE type {kind!r} is not supported; supported: {', '.join(sorted(_KINDS))}")
    if float(config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelUnsupported("models that rotate only a part of each head are not supported")
    base = float(parameters.get("rope_theta", 10000.0))
    plain = base ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    frequencies, scale = _KINDS[kind](plain, base, parameters, config)
    return Rope(tuple(float(f) for f in frequencies.astype(np.float32)), scale)


def llamacpp_rope(config: dict[str, Any], head_dim: int) -> Rope:
    """The RoPE that llama.cpp applies: it always rounds YaRN's range to integers."""
    return rope_from_config(config | {"rope_parameters": rope_parameters(config) | {"truncate": True}}, head_dim)


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """One dict with `rope_theta` and the scaling, from either spelling."""
    merged = {"rope_theta": config.get("rope_theta", 10000.0)}
    for key in ("rope_scaling", "rope_parameters"):
        merged |= {k: v for k, v in (config.get(key) or {}).items() if v is not None}
    return merged


def _default(
    plain: Frequencies, base: float, rope: dict[str, Any], config: dict[str, Any]
) -> tuple[Frequencies, float]:
    return plain, 1.0


def _linear(plain: Frequencies, base: float, rope: dict[str, Any], config: dict[str, Any]) -> tuple[Frequencies, float]:
    return plain / float(rope["factor"]), 1.0


def _llama3(plain: Frequencies, base: float, rope: dict[str, Any], config: dict[str, Any]) -> tuple[Frequencies, float]:
    factor, original = float(rope["factor"]), float(rope["original_max_position_embeddings"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    turns = original * plain / (2 * math.pi)
    smooth = (turns - low) / (high - low)
    blended = ((1 - smooth) / factor + smooth) * plain
    return np.where(turns < low, plain / factor, np.where(turns > high, plain, blended)), 1.0


def _yarn(plain: Frequencies, base: float, rope: dict[str, Any], config: dict[str, Any]) -> tuple[Frequencies, float]:
    factor = float(rope["factor"])
    original = float(rope.get("original_max_position_embeddings") or config["max_position_embeddings"])
    dims = 2 * len(plain)

    def pair_turning(turns: float) -> float:
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_turning(rope.get("beta_fast", 32)), pair_turning(rope.get("beta_slow", 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = np.clip((np.arange(dims // 2) - low) / ((high - low) or 0.001), 0, 1)
    return plain / factor * ramp + plain * (1 - ramp), _yarn_scale(factor, rope)


def _yarn_scale(factor: float, rope: dict[str, Any]) -> float:
    def mscale(weight: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if "attention_factor" in rope:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return mscale(rope["mscale"]) / mscale(rope["mscale_all_dim"])
    return mscale()


def _divided(
    plain: Frequencies, base: float, rope: dict[str, Any], config: dict[str, Any]
) -> tuple[Frequencies, float]:
    return plain / np.array(rope["divisors"], np.float64), 1.0


_KINDS = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn, "divided": _divided}
