"""Models without weights, for the simulated engine: the KV shape of a real model, a small tokenizer, nothing else.

Made in the store when they are asked for, the same bytes on every machine. The text such a model writes is a row of
numbers in brackets, so that nobody takes it for an answer; every one of them is a token, also on the way back in, so a
chat's second turn begins with the very tokens of its first.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from disaggregated_inference.errors import ModelNotFound
from disaggregated_inference.kv.fingerprint import Weights

PREFIX = "simulated:"
VOCABULARY = 1024  # small on purpose: a row of logits travels with every prompt
SPECIAL = ("<s>", "</s>", "<|role|>", "<|end|>")
EOS = 1
FIRST_WORD = len(SPECIAL) + 256  # after the bytes come the words that answers are made of

# Raised when what is made here changes: it names a folder, so what an older version made is not looked at.
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
    # Nobody's shape, 512 bytes per token: what is measured with it is everything but the bytes.
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
NAMES = tuple(PREFIX + shape for shape in SHAPES)


def folder_of(root: Path, name: str) -> Path:
    """Where the model called `simulated:...` is, once it was made."""
    return root / "simulated" / _VERSION / name.lower().removeprefix(PREFIX)


def ensure_folder(root: Path, name: str) -> Path:
    """The model's folder, made if need be."""
    folder = folder_of(root, name)
    if folder.name not in SHAPES:
        raise ModelNotFound(f"no model {name!r}; simulated are {', '.join(NAMES)}")
    return write_folder(folder, config_of(folder.name, SHAPES[folder.name]))


def config_of(shape: str, sizes: dict[str, Any]) -> dict[str, Any]:
    common = {"simulated": shape, "vocab_size": VOCABULARY, "eos_token_id": EOS, "torch_dtype": "bfloat16"}
    return sizes | common


def write_folder(folder: Path, config: dict[str, Any]) -> Path:
    """The config comes last: with it the folder is whole. Several processes may write at once, the same bytes."""
    settings = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[EOS], "chat_template": _TEMPLATE}
    if not (folder / "config.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / "tokenizer.json", tokenizer(config["vocab_size"]).to_str())
        _write(folder / "tokenizer_config.json", json.dumps(settings, indent=2))
        _write(folder / "config.json", json.dumps(config, indent=2))
    return folder


def tokenizer(vocabulary: int = VOCABULARY) -> Tokenizer:
    """Bytes, each a token, and behind them the words: [0260], [0261] and so on."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={text: at for at, text in enumerate([*SPECIAL, *letters])}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    made.add_tokens([f"[{at:04d}]" for at in range(FIRST_WORD, vocabulary)])
    return made


def identity(config: dict[str, Any]) -> Weights:
    """What stands for the weights in a fingerprint: everything that the config says."""
    said = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:32]
    return Weights(norms=said, format="simulated", sample=said)


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(text + "\n", "utf-8")
    partial.replace(path)
