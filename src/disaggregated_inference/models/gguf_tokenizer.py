"""The tokenizer inside a GGUF: it has vocabulary and merges, but only the name of its pre-tokenizer."""

from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from disaggregated_inference.errors import ModelDamaged, ModelUnsupported
from disaggregated_inference.models.gguf import GGUFFile
from disaggregated_inference.models.tokenizer import ModelTokenizer

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5

_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN = rf"{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_LLAMA3 = rf"{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)


class _PreTokenizer(NamedTuple):
    """How one model family splits text before the merges; by default as GPT-2."""

    expression: str = ""
    single_digits: bool = False
    composed: bool = False  # normalize to NFC first
    whole_words: bool = False  # a word in the vocabulary is one token, without merges


# By llama.cpp's names.
PRE_TOKENIZERS = {
    "gpt-2": _PreTokenizer(),
    "smollm": _PreTokenizer(single_digits=True),
    "qwen2": _PreTokenizer(_QWEN, composed=True),
    "llama-bpe": _PreTokenizer(_LLAMA3, whole_words=True),
    "gpt-4o": _PreTokenizer(_GPT4O),
}

# Tokens that end a completion in the supported families; a GGUF's metadata names only one of them.
_ENDS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|return|>", "<|call|>")


def tokenizer_from_gguf(file: GGUFFile) -> ModelTokenizer:
    meta = file.metadata
    return ModelTokenizer(_build_tokenizer(file), meta.get("tokenizer.chat_template", ""), special_texts(meta))


def special_texts(meta: dict[str, Any]) -> dict[str, str]:
    """The special tokens that chat templates use."""
    tokens = meta["tokenizer.ggml.tokens"]
    ids = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "pad_token": "padding_token_id"}
    found = {name: meta.get(f"tokenizer.ggml.{key}") for name, key in ids.items()}
    return {name: tokens[at] for name, at in found.items() if at is not None and 0 <= at < len(tokens)}


def end_tokens(meta: dict[str, Any]) -> list[int]:
    """The end tokens in the metadata, and the control tokens in `_ENDS`."""
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta.get("tokenizer.ggml.token_type") or []
    declared = [meta.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    pairs = enumerate(zip(tokens, kinds, strict=False))
    named = [at for at, (token, kind) in pairs if kind == _CONTROL and token in _ENDS]
    return list(dict.fromkeys(at for at in (*declared, *named) if at is not None and 0 <= at < len(tokens)))


def _build_tokenizer(file: GGUFFile) -> Tokenizer:
    meta, cut = file.metadata, _pre_tokenizer(file)
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    kinds: list[int] = meta.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise ModelDamaged(f"{file.path}: {len(tokens)} tokens but {len(kinds)} token types")
    merges = [tuple(merge.split(" ", 1)) for merge in meta.get("tokenizer.ggml.merges", ())]
    if odd := next((merge for merge in merges if len(merge) != 2), None):
        raise ModelDamaged(f"{file.path}: {odd[0]!r} in tokenizer.ggml.merges is not a pair")
    vocabulary = {token: at for at, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != _UNUSED}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=cut.whole_words))
    except Exception as error:  # the Rust side raises no narrower class
        raise ModelDamaged(f"{file.path}: its vocabulary and merges do not match: {error}") from error
    if cut.composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_steps(cut))
    tokenizer.decoder = decoders.ByteLevel()
    named = list(zip(tokens, kinds, strict=True))
    tokenizer.add_special_tokens([_added(token, special=True) for token, kind in named if kind == _CONTROL])
    tokenizer.add_tokens([_added(token, special=False) for token, kind in named if kind == _USER_DEFINED])
    return tokenizer


def _pre_tokenizer(file: GGUFFile) -> _PreTokenizer:
    meta = file.metadata
    kind, name = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre", "")
    if kind != "gpt2" or name not in PRE_TOKENIZERS:
        raise ModelUnsupported(
            f"{file.path}: tokenizer {kind!r} with pre-tokenizer {name!r} cannot be built from a GGUF (supported:"
            f" {', '.join(PRE_TOKENIZERS)}); put the model's tokenizer.json and tokenizer_config.json beside the file"
        )
    return PRE_TOKENIZERS[name]


def _steps(cut: _PreTokenizer) -> list[Any]:
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not cut.expression)
    if cut.expression:
        return [pre_tokenizers.Split(Regex(cut.expression), behavior="isolated"), plain]
    return [pre_tokenizers.Digits(individual_digits=True), plain] if cut.single_digits else [plain]


def _added(token: str, special: bool) -> AddedToken:
    return AddedToken(token, special=special, normalized=False)
