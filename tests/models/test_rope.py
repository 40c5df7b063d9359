"""Our frequencies are the reference for every engine, so they are checked against transformers' own."""

from typing import Any

import numpy as np
import pytest
from transformers import GptOssConfig, LlamaConfig, Qwen3MoeConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from disaggregated_inference.errors import ModelUnsupported
from disaggregated_inference.models import rope_from_config

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
}


@pytest.mark.parametrize(
    ("kind", "make", "rope", "theta", "head_dim"),
    [
        ("linear", LlamaConfig, {"rope_type": "linear", "factor": 4.0}, 10000.0, 64),
        ("llama3", LlamaConfig, LLAMA3, 500000.0, 128),
        ("yarn", GptOssConfig, YARN | {"truncate": False}, 150000.0, 64),
        ("yarn", GptOssConfig, YARN | {"truncate": True}, 150000.0, 64),
        ("yarn", Qwen3MoeConfig, YARN | {"factor": 4.0, "original_max_position_embeddings": 32768}, 1e6, 128),
        ("yarn", LlamaConfig, YARN | {"mscale": 0.8, "mscale_all_dim": 0.5}, 10000.0, 64),
        ("yarn", LlamaConfig, YARN | {"attention_factor": 1.25}, 10000.0, 64),
    ],
)
def test_equal_to_transformers(kind: str, make: Any, rope: dict[str, Any], theta: float, head_dim: int) -> None:
    settings = {"head_dim": head_dim, "max_position_embeddings": 131072}
    config = make(**settings, rope_parameters=rope | {"rope_theta": theta})
    expected, scale = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    for spelled in (
        settings | {"rope_theta": theta, "rope_scaling": rope},
        settings | {"rope_parameters": rope | {"rope_theta": theta}},
    ):
        ours = rope_from_config(spelled, head_dim)
        assert np.allclose(ours.frequencies, expected.numpy(), rtol=2e-6, atol=0)
        assert ours.scale == pytest.approx(scale)


def test_default_base_and_unknown_kinds() -> None:
    plain = rope_from_config({"rope_theta": 100000.0, "rope_scaling": None}, 4)
    assert plain.frequencies == pytest.approx((1.0, 100000.0**-0.5))
    with pytest.raises(ModelUnsupported, match="longrope"):
        rope_from_config({"rope_scaling": {"rope_type": "longrope"}}, 64)
    with pytest.raises(ModelUnsupported, match="part of each head"):
        rope_from_config({"partial_rotary_factor": 0.5}, 64)
