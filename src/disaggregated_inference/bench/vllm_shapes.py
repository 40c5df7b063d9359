"""Models for vLLM that have a shape and no weights: a folder with a config and a tokenizer. A plugin of ours makes the
weights up (`vllm_weights`)."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from disaggregated_inference.kv import Fingerprint, Weights
from disaggregated_inference.models import ModelFiles, simulated

_QWEN = simulated.SHAPES["qwen3-30b-a3b"] | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
}
_GPT_OSS = simulated.SHAPES["gpt-oss-120b"] | {
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "experts_per_token": 4,
    "initial_context_length": 4096,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "swiglu_limit": 7.0,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
_TINY = simulated.SHAPES["tiny"] | {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
}
_COMMON = {"hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": _QWEN | _COMMON,
    "gpt-oss-120b": _GPT_OSS | _COMMON,
    "tiny": _TINY | _COMMON,  # for trying the benchmark on a CPU
}
_PLUGIN = "[vllm.general_plugins]\ndisagg_bench_weights = disaggregated_inference.bench.vllm_weights:install\n"


class ShapeFiles(ModelFiles):
    """There are no weights to identify."""

    @cached_property
    def fingerprint(self) -> Fingerprint:
        weights = Weights(norms="random", format="random", sample="random")
        return self.spec.fingerprint(tokenizer="", chat_template="", weights=weights)


def write_shape(shape: str, folder: Path, layers: int = 0) -> ShapeFiles:
    """`layers`: only the first of them; 0: all."""
    config = dict(SHAPES[shape])
    if layers:
        config |= {"num_hidden_layers": layers}
        config |= {"layer_types": config["layer_types"][:layers]} if "layer_types" in config else {}
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(simulated.tokenizer().to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "config.json").write_text(json.dumps(config))
    return ShapeFiles(shape, folder)


def write_plugin(folder: Path) -> None:
    """What vLLM finds on its `PYTHONPATH` and loads in each of its processes."""
    about = folder / "disagg_bench-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: disagg-bench\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(_PLUGIN)
