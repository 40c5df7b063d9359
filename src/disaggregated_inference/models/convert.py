"""Converts a GGUF file to what transformers and mlx-lm load: names, basis, config, tokenizer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from disaggregated_inference.errors import ModelDamaged, ModelUnsupported
from disaggregated_inference.kv import Array, Weights
from disaggregated_inference.models.completeness import require_complete_gguf
from disaggregated_inference.models.gguf import GGUFFile
from disaggregated_inference.models.gguf_metadata import ARCHITECTURES
from disaggregated_inference.models.gguf_tokenizer import end_tokens, special_texts, tokenizer_from_gguf
from disaggregated_inference.models.safetensors import StoredTensor, write_tensors
from disaggregated_inference.models.weights_hash import hash_weights

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

OnStep = Callable[[str, float], None]


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        return f"model.layers.{layer}.{_LAYER_NAMES.get(part, part)}.{suffix}"
    return f"{_TOP_NAMES.get(stem, stem)}.{suffix}"


def config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """A `config.json` for transformers, mlx-lm and ModelSpec."""
    meta, kind = file.metadata, file.metadata.get("general.architecture", "unknown")
    if kind not in ARCHITECTURES:
        raise ModelUnsupported(
            f"{file.path}: GGUF architecture {kind!r} is not supported: {', '.join(ARCHITECTURES)} are"
        )
    if kind == "llama" and meta.get("llama.expert_count"):
        raise ModelUnsupported(f"{file.path}: a llama model with experts (Mixtral) is not supported")

    needed = ("embedding_length", "block_count", "attention.head_count", "context_length", "feed_forward_length")
    for key in (*(f"{kind}.{key}" for key in needed), "tokenizer.ggml.tokens"):
        if key not in meta:
            raise ModelDamaged(f"{file.path}: its metadata lacks {key}")

    def get(key: str, default: Any = None) -> Any:
        return meta.get(f"{kind}.{key}", default)

    heads = get("attention.head_count")
    config: dict[str, Any] = {
        "model_type": ARCHITECTURES[kind],
        "hidden_size": get("embedding_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": get("attention.key_length", get("embedding_length") // heads),
        "intermediate_size": get("feed_forward_length"),
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": round(get("attention.layer_norm_rms_epsilon", 1e-5), 12),
        "rope_theta": get("rope.freq_base", 10000.0),
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "hidden_act": "silu",
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_tokens(meta),
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
    }
    if get("attention.sliding_window"):
        config["sliding_window"] = get("attention.sliding_window")
    if (scaling := get("rope.scaling.type", "none")) != "none":
        config["rope_scaling"] = {
            "rope_type": scaling,
            "factor": get("rope.scaling.factor"),
            "original_max_position_embeddings": get("rope.scaling.original_context_length"),
            "truncate": kind != "gpt-oss",  # GGUF has no key for it; GPT-OSS's checkpoint has false
        }
        betas = {beta: get(f"rope.scaling.yarn_{beta}") for beta in ("beta_fast", "beta_slow")}
        config["rope_scaling"] |= {beta: value for beta, value in betas.items() if value}
    if "rope_freqs.weight" in file.tensors:  # Llama 3's scaling in a GGUF
        config["rope_scaling"] = {"rope_type": "divided", "divisors": file.load("rope_freqs.weight").tolist()}
    return config


def hash_gguf(file: GGUFFile) -> Weights:
    """Identity under the Hugging Face names, so that a GGUF and a safetensors folder of one model have equal norms."""
    kind = file.metadata["general.architecture"]
    require_complete_gguf(file.path, ARCHITECTURES[kind], file.metadata[f"{kind}.block_count"], file.tensors)
    kinds = {tensor.type_name for name, tensor in file.tensors.items() if name.startswith("blk.")}
    return hash_weights((stored(file, name) for name in file.tensors), "gguf:" + "+".join(sorted(kinds)))


def stored(file: GGUFFile, name: str) -> StoredTensor:
    tensor = file.tensors[name]
    if name.endswith("norm.weight"):
        return StoredTensor(hugging_face_name(name), "F32", tensor.shape, memoryview(file.load(name).tobytes()))
    return StoredTensor(hugging_face_name(name), tensor.type_name, tensor.shape, tensor.data)


def convert_gguf(file: GGUFFile, folder: Path, progress: OnStep) -> None:
    """Write a safetensors folder with the GGUF's dequantized weights in float32."""
    config = config_from_gguf(file)
    if config["model_type"] != "llama":
        raise ModelUnsupported(f"converting a {config['model_type']} GGUF to safetensors is not supported")
    config |= {"architectures": ["LlamaForCausalLM"], "torch_dtype": "float32", "attention_bias": False}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    sources = {hugging_face_name(name): name for name in file.tensors}
    done = 0

    def load(name: str) -> Array:
        nonlocal done
        done += 1
        progress("converting", done / len(sources))
        part = sources[name].split(".")[-2]
        values = file.load(sources[name])
        return _undo_permutation(values, heads[part]) if part in heads else values

    shapes = {name: file.tensors[source].shape for name, source in sources.items()}
    write_tensors(folder / "model.safetensors", shapes, load)
    _write_json(folder / "config.json", config)
    _write_tokenizer(file, folder)


def _undo_permutation(weight: Array, heads: int) -> Array:
    """llama.cpp interleaves the two halves of each rotated head; Hugging Face does not."""
    rows, columns = weight.shape
    return np.swapaxes(weight.reshape(heads, rows // heads // 2, 2, columns), 1, 2).reshape(rows, columns)


def _write_tokenizer(file: GGUFFile, folder: Path) -> None:
    meta, tokenizer = file.metadata, tokenizer_from_gguf(file)
    (folder / "tokenizer.json").write_text(tokenizer.json, "utf-8")
    settings: dict[str, Any] = special_texts(meta) | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": meta["llama.context_length"],
    }
    _write_json(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(tokenizer.chat_template, "utf-8")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
