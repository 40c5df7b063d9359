"""Models without weights, for the simulated engine: the KV shape of a real model and a small tokenizer.

Created in the store on first use, with the same bytes on every machine. A simulated completion is a list of numbers in
brackets, so that it cannot be mistaken for a real one. Each is one token in both directions, so the second message of a
chat starts with exactly the tokens of the first.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from disaggregated_inference.errors import ModelNotFound
from disaggregated_inference.kv import Weights
from disaggregated_inference.private_files import make_folders

PREFIX = "simulated:"
VOCABULARY = 1024  # small on purpose: logits are sent with every prompt
SPECIAL_TOKENS = ("<s>", "</s>", "<|role|>", "<|end|>")
EOS = 1
FIRST_WORD = len(SPECIAL_TOKENS) + 256  # the words of completions come after the bytes

# Raise it when the files change. It is part of the folder's name, so files of older versions are not used.
_VERSION = "1"

_TEMPLATE = (
    "{% for m in messages %}<|role|>{{ m['role'] }}\n{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|role|>assistant\n{% endif %}"
)

SHAPES: dict[str, dict[str, Any]] = {
    # Qwen3-Coder-30B-A3B: 98,304 bytes per token in bfloat16.
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rope_theta": 10000000.0,
    },
    # 36,864 bytes per token in bfloat16, and 4.7 MB once: every second layer keeps a window of 128.
    "gpt-oss-120b": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "max_position_embeddings": 131072,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    # Not a real model, 512 bytes per token: for measuring everything except the transfer of bytes.
    "tiny": {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 131072,
        "rope_theta": 10000.0,
    },
}
SIMULATED_MODELS = tuple(PREFIX + shape for shape in SHAPES)


def folder_of(root: Path, name: str) -> Path:
    """The folder of a simulated model, which may not exist yet."""
    return root / "simulated" / _VERSION / name.lower().removeprefix(PREFIX)


def ensure_folder(root: Path, name: str) -> Path:
    """The model's folder, created if necessary."""
    folder = folder_of(root, name)
    if folder.name not in SHAPES:
        raise ModelNotFound(f"no model {name!r}; simulated models: {', '.join(SIMULATED_MODELS)}")
    return write_folder(folder, config_of(folder.name, SHAPES[folder.name]))


def config_of(shape: str, sizes: dict[str, Any]) -> dict[str, Any]:
    common = {"simulated": shape, "vocab_size": VOCABULARY, "eos_token_id": EOS, "torch_dtype": "bfloat16"}
    return sizes | common


def write_folder(folder: Path, config: dict[str, Any]) -> Path:
    """The config is written last and marks the folder complete. Several processes may write the same bytes at once."""
    settings = {"bos_token": SPECIAL_TOKENS[0], "eos_token": SPECIAL_TOKENS[EOS], "chat_template": _TEMPLATE}
    if not (folder / "config.json").is_file():
        make_folders(folder)
        _write(folder / "tokenizer.json", tokenizer(config["vocab_size"]).to_str())
        _write(folder / "tokenizer_config.json", json.dumps(settings, indent=2))
        _write(folder / "config.json", json.dumps(config, indent=2))
    return folder


def tokenizer(vocabulary: int = VOCABULARY) -> Tokenizer:
    """One token per byte, followed by the words: [0260], [0261] and so on."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={text: at for at, text in enumerate([*SPECIAL_TOKENS, *letters])}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL_TOKENS))
    made.add_tokens([f"[{at:04d}]" for at in range(FIRST_WORD, vocabulary)])
    return made


def hash_config(config: dict[str, Any]) -> Weights:
    """In a fingerprint, it stands for the weights."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:32]
    return Weights(norms=digest, format="simulated", sample=digest)


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(text + "\n", "utf-8")
    partial.replace(path)
