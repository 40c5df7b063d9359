"""Checks the GGUF metadata fields that are used, once, when the file is opened."""

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from disaggregated_inference.errors import ModelDamaged

# Supported architectures: GGUF's names and those of transformers.
ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss"}

_MAX = 1 << 31
_MAX_LAYERS = 10_000
_MAX_FLOAT = sys.float_info.max


# The descriptions complete the sentence "should be ...". The upper bounds exclude infinity.
_Text = Annotated[str, Meta(description="a string")]
_Texts = Annotated[list[str], Meta(description="a list of strings")]
_Kinds = Annotated[list[int], Meta(description="a list of integers")]
_Id = Annotated[int, Meta(ge=-_MAX, le=2 * _MAX, description="a token id")]
_Count = Annotated[int, Meta(ge=1, le=_MAX, description="an integer above zero")]
_Layers = Annotated[int, Meta(ge=1, le=_MAX_LAYERS, description=f"a number of layers, 1 to {_MAX_LAYERS}")]
_NoneOrMore = Annotated[int, Meta(ge=0, le=_MAX, description="an integer")]
_Size = Annotated[float, Meta(gt=0, le=_MAX_FLOAT, description="a number above zero")]
_Amount = Annotated[float, Meta(ge=0, le=_MAX_FLOAT, description="a number, not below zero")]

_GENERAL: dict[str, Any] = {
    "general.architecture": _Text,
    "tokenizer.chat_template": _Text,
    "tokenizer.ggml.model": _Text,
    "tokenizer.ggml.pre": _Text,
    "tokenizer.ggml.tokens": _Texts,
    "tokenizer.ggml.merges": _Texts,
    "tokenizer.ggml.token_type": _Kinds,
    **{f"tokenizer.ggml.{name}_token_id": _Id for name in ("bos", "eos", "eot", "eom", "padding")},
}
_OF_ARCHITECTURE: dict[str, Any] = {
    "block_count": _Layers,
    "embedding_length": _Count,
    "context_length": _Count,
    "feed_forward_length": _Count,
    "expert_count": _NoneOrMore,
    "attention.head_count": _Count,
    "attention.head_count_kv": _Count,
    "attention.key_length": _Count,
    "attention.sliding_window": _NoneOrMore,
    "attention.layer_norm_rms_epsilon": _Size,
    "rope.freq_base": _Size,
    "rope.scaling.type": _Text,
    "rope.scaling.factor": _Size,
    "rope.scaling.original_context_length": _Count,
    "rope.scaling.yarn_beta_fast": _Amount,
    "rope.scaling.yarn_beta_slow": _Amount,
}


def require_valid_metadata(path: Path, meta: dict[str, Any]) -> None:
    """An unsupported architecture is not checked further: it is refused by its name later."""
    _require(path, meta, _GENERAL)
    kind = meta.get("general.architecture")
    if kind in ARCHITECTURES:
        _require(path, meta, {f"{kind}.{key}": value for key, value in _OF_ARCHITECTURE.items()})


def _require(path: Path, meta: dict[str, Any], kinds: dict[str, Any]) -> None:
    for key in (key for key in kinds if key in meta):
        try:
            msgspec.convert(meta[key], kinds[key])
        except msgspec.ValidationError:
            expected = kinds[key].__metadata__[0].description
            raise ModelDamaged(f"{path}: its {key} is {_shorten(meta[key])}, and should be {expected}") from None


def _shorten(value: Any) -> str:
    """A list may have 150,000 tokens."""
    some = value[:4] if isinstance(value, list | str) else value
    return repr(some) + (f" ... ({len(value)} in all)" if some is not value and len(value) > 4 else "")
