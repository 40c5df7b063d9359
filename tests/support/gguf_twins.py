"""GGUF files with the very weights of a safetensors folder, for llama.cpp to load what torch and MLX load."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter, RopeScalingType

from disaggregated_inference.kv import Array
from disaggregated_inference.models import ModelFiles
from disaggregated_inference.models.safetensors import read_tensors

_KINDS = {"llama": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss"}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
}


def write_twin(folder: Path, path: Path, **options: Any) -> Path:
    """The model in `folder`, float32 throughout. Its tokenizer.json is expected beside the GGUF."""
    model = ModelFiles("twin", folder)
    writer = GGUFWriter(path, _KINDS[model.spec.architecture], **options)
    _add_shape(writer, model)
    _add_tokenizer(writer, model)
    for name, values in _tensors(model):
        writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_shape(writer: GGUFWriter, model: ModelFiles) -> None:
    config, layout = model.config, model.spec.layout
    writer.add_block_count(len(layout.layers))
    writer.add_context_length(model.spec.context_window)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(layout.kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(layout.head_dim)
    writer.add_value_length(layout.head_dim)
    writer.add_rope_dimension_count(layout.head_dim)
    if experts := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size", config["intermediate_size"]))
    if window := max(plan.window for plan in layout.layers):
        writer.add_sliding_window(window)
    _add_rope(writer, config)


def _add_rope(writer: GGUFWriter, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or {"rope_theta": config["rope_theta"]}
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def _add_tokenizer(writer: GGUFWriter, model: ModelFiles) -> None:
    """llama.cpp wants one, with a merge at least; the ids that the model has no text for are filled up."""
    vocabulary = json.loads((model.path / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    tokens += [f"[{at}]" for at in range(len(tokens), model.spec.vocabulary)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(model.config["bos_token_id"])
    writer.add_eos_token_id(model.spec.eos_tokens[0])


def _tensors(model: ModelFiles) -> Iterator[tuple[str, Array]]:
    stored = {
        tensor.name: np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)
        for path in model.path.glob("*.safetensors")
        for tensor in read_tensors(path)
    }
    heads = {"attn_q": model.config["num_attention_heads"], "attn_k": model.spec.layout.kv_heads}
    for name, values in _with_joined_experts(stored).items():
        stem, _, suffix = name.rpartition(".")
        if stem in _TOP:
            yield f"{_TOP[stem]}.{suffix}", values
            continue
        _, _, layer, part = stem.split(".", 3)
        part = _LAYER.get(part, part)
        if part == "ffn_norm" and model.spec.architecture == "gpt_oss":
            part = "post_attention_norm"
        if part in heads and model.spec.architecture == "llama":
            values = _permuted(values, heads[part])
        yield f"blk.{layer}.{part}.{suffix}", values
    if model.spec.architecture == "llama":
        yield "rope_freqs.weight", _divisors(model)


def _with_joined_experts(stored: dict[str, Array]) -> dict[str, Array]:
    """One tensor for all experts of a layer; GPT-OSS keeps gate and up as one, row by row in turn."""
    found: dict[str, Array] = {}
    for name, values in stored.items():
        layer, _, part = name.partition(".mlp.experts.")
        if not part:
            found[name.replace("self_attn.sinks", "attn_sinks.weight")] = values
        elif part.startswith("gate_up_proj"):
            wide = values.swapaxes(1, 2) if values.ndim == 3 else values
            suffix = "bias" if part.endswith("bias") else "weight"
            found |= {f"{layer}.ffn_{half}_exps.{suffix}": wide[:, at::2] for at, half in enumerate(("gate", "up"))}
        elif part == "down_proj":
            found[f"{layer}.ffn_down_exps.weight"] = values.swapaxes(1, 2)
        elif part == "down_proj_bias":
            found[f"{layer}.ffn_down_exps.bias"] = values
        elif part.startswith("0."):
            kind = part.split(".")[1].removesuffix("_proj")
            count = sum(other.startswith(f"{layer}.mlp.experts.") and f".{kind}_proj" in other for other in stored)
            parts = [stored[f"{layer}.mlp.experts.{at}.{kind}_proj.weight"] for at in range(count)]
            found[f"{layer}.ffn_{kind}_exps.weight"] = np.stack(parts)
    return found


def _permuted(weight: Array, heads: int) -> Array:
    """The two halves of each head's rows, row by row in turn: as llama.cpp's own converter does."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _divisors(model: ModelFiles) -> Array:
    """How a GGUF keeps Llama 3's scaling: what each plain frequency is divided by."""
    rope, width = model.config.get("rope_parameters") or model.config, model.spec.layout.head_dim
    plain = rope["rope_theta"] ** (-np.arange(0, width, 2, dtype=np.float64) / width)
    return plain / np.array(model.spec.rope.frequencies)
