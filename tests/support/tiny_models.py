"""Tiny random-weight models of every supported architecture, saved the way people's models are saved.

`twin_llama` and so on are for comparing with llama.cpp, which gets the same weights as a GGUF (gguf_twins.py)."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

VOCABULARY = 512
WINDOW = 128

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
# A tiny head has few pairs: numbers chosen so that YaRN's range is not whole, as in the real GPT-OSS.
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 2048,
}
# The same with a range from the first pair to past the last, which cannot be rounded: llama.cpp always does.
_WHOLE_YARN_ROPE = _YARN_ROPE | {"beta_fast": 400.0, "beta_slow": 0.0005}


# What keeps the twins' answers the same in half precision, which is all that llama.cpp's attention has: flatter scores,
# and layers that add less. A wrong cache changes the argmax all the same.
_GENTLE = {"q_proj.weight": 0.3, "q_norm": 0.3, "o_proj.weight": 0.3, "down_proj": 0.3}


def config_of(architecture: str, **changes: Any) -> PretrainedConfig:
    """`changes` of the shape."""
    shape = _SHAPE | changes
    if architecture == "twin_gpt_oss":
        return GptOssConfig(**config_of("gpt_oss", **changes).to_dict() | {"rope_parameters": _WHOLE_YARN_ROPE})
    architecture = architecture.removeprefix("twin_")
    if architecture == "llama":
        return LlamaConfig(**shape, rope_parameters=_LLAMA3_ROPE)
    if architecture == "qwen3":
        return Qwen3Config(**shape, rope_parameters={"rope_type": "default", "rope_theta": 1000000.0})
    if architecture == "qwen3_moe":
        rope = {"rope_type": "default", "rope_theta": 10000000.0}
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
        return Qwen3MoeConfig(**shape, **experts, rope_parameters=rope)
    return GptOssConfig(
        **shape,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters=_YARN_ROPE,
    )


# Seeds for which no prompt of the suite brings a router or an argmax near a tie (tests/test_contract.py checks it).
_SEEDS = {"llama": 0, "qwen3": 0, "qwen3_moe": 0, "gpt_oss": 1}


def save_tiny(architecture: str, folder: Path, seed: int | None = None, **changes: Any) -> Path:
    """Weights drawn so that attention matters and logits spread wide: a wrong cache changes the argmax."""
    torch.manual_seed(_SEEDS[architecture.removeprefix("twin_")] if seed is None else seed)
    config = config_of(architecture, **changes)
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gentle = (scale for part, scale in _GENTLE.items() if part in name and architecture.startswith("twin_"))
            parameter.copy_(_draw(name, parameter) * next(gentle, 1.0))
    model.save_pretrained(folder)
    _save_tokenizer(folder)
    return folder


def _draw(name: str, parameter: torch.Tensor) -> torch.Tensor:
    noise = torch.randn_like(parameter)
    if "norm" in name:
        return 1.0 + 0.2 * noise
    if name.endswith(("bias", "sinks")):
        return 0.3 * noise
    if "embed" in name:
        return noise
    return 1.6 * noise / parameter.shape[-1] ** 0.5


def _save_tokenizer(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1} | {letter: index + 2 for index, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>{% endfor %}<s>assistant\n"
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
