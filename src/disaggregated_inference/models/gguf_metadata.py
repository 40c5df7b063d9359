"""What a GGUF's metadata may hold, in the fields that we read: checked once, when the file is opened."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from disaggregated_inference.errors import ModelDamaged

# GGUF's names for the architectures that we run, and transformers' for them.
ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss"}

_MOST = 1 << 31
_MOST_LAYERS = 10_000


class _Rule(NamedTuple):
    what: str
    holds: Callable[[Any], bool]


def _whole(value: Any, least: int, most: int = _MOST) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


_TEXT = _Rule("a text", lambda value: isinstance(value, str))
_TEXTS = _Rule("a list of texts", lambda value: _list_of(str, value))
_KINDS = _Rule("a list of whole numbers", lambda value: _list_of(int, value))
_ID = _Rule("a token's id", lambda value: _whole(value, -_MOST, 2 * _MOST))
_COUNT = _Rule("one whole number above zero", lambda value: _whole(value, 1))
_LAYERS = _Rule(f"a number of layers, 1 to {_MOST_LAYERS}", lambda value: _whole(value, 1, _MOST_LAYERS))
_NONE_OR_MORE = _Rule("one whole number", lambda value: _whole(value, 0))
_SIZE = _Rule("a number above zero", lambda value: _number(value) and value > 0)
_AMOUNT = _Rule("a number, not below zero", lambda value: _number(value) and value >= 0)

_GENERAL = {
    "general.architecture": _TEXT,
    "tokenizer.chat_template": _TEXT,
    "tokenizer.ggml.model": _TEXT,
    "tokenizer.ggml.pre": _TEXT,
    "tokenizer.ggml.tokens": _TEXTS,
    "tokenizer.ggml.merges": _TEXTS,
    "tokenizer.ggml.token_type": _KINDS,
    **{f"tokenizer.ggml.{name}_token_id": _ID for name in ("bos", "eos", "eot", "eom", "padding")},
}
_OF_ARCHITECTURE = {
    "block_count": _LAYERS,
    "embedding_length": _COUNT,
    "context_length": _COUNT,
    "feed_forward_length": _COUNT,
    "expert_count": _NONE_OR_MORE,
    "attention.head_count": _COUNT,
    "attention.head_count_kv": _COUNT,
    "attention.key_length": _COUNT,
    "attention.sliding_window": _NONE_OR_MORE,
    "attention.layer_norm_rms_epsilon": _SIZE,
    "rope.freq_base": _SIZE,
    "rope.scaling.type": _TEXT,
    "rope.scaling.factor": _SIZE,
    "rope.scaling.original_context_length": _COUNT,
    "rope.scaling.yarn_beta_fast": _AMOUNT,
    "rope.scaling.yarn_beta_slow": _AMOUNT,
}


def require_sound(path: Path, meta: dict[str, Any]) -> None:
    """Of an architecture that we do not run, nothing more is asked: it is refused by its name."""
    _require(path, meta, _GENERAL)
    kind = meta.get("general.architecture")
    if kind in ARCHITECTURES:
        _require(path, meta, {f"{kind}.{key}": rule for key, rule in _OF_ARCHITECTURE.items()})


def _require(path: Path, meta: dict[str, Any], rules: dict[str, _Rule]) -> None:
    for key, rule in rules.items():
        if key in meta and not rule.holds(meta[key]):
            raise ModelDamaged(f"{path}: its {key} is {_shown(meta[key])}, and should be {rule.what}")


def _shown(value: Any) -> str:
    """Not 150,000 tokens."""
    some = value[:4] if isinstance(value, list | str) else value
    return repr(some) + (f" ... ({len(value)} in all)" if some is not value and len(value) > 4 else "")
