"""Whether two names mean one model: a node names its model by a path, a GGUF file, a repository or an Ollama tag.

Not part of a name: case, the folder or organisation before it, `.gguf`, the part of a split file, `:latest`, the
storage format at its end (`-FP8`, `-4bit`, `-Q4_K_M`), and which of `: _ -` and space separates its words. Names of
one model in `disagg models list` are one name. Everything else is: `qwen3:30b` and `qwen3-coder:30b` differ.
"""

import re
from collections.abc import Iterable
from functools import cache

from disaggregated_inference.models.registered_names import bare_name
from disaggregated_inference.models.store import ALIASES, SHORT_NAMES

_SEPARATORS = re.compile(r"[\s:_-]+")
_SPLIT_FILE = re.compile(r"-\d{5}-of-\d{5}$")
_FORMAT = re.compile(
    r"-(gguf|mlx|awq|gptq|mxfp4|nvfp4|fp8|fp4|fp16|bf16|f16|f32|int4|int8|[2-8]bit|(ud-)?i?q[2-8](-[0-9a-z]{1,3})*)$"
)
_CACHED = re.compile(r"(?:^|/)models--[^/]*--([^/]+)/")  # a folder of the Hugging Face cache: its last part is a hash


def is_same_model(name: str, others: Iterable[str]) -> bool:
    return _canonical(name) in {_canonical(other) for other in others}


def _canonical(name: str) -> str:
    plain = _plain(name)
    return _known().get(plain, plain)


def _plain(name: str) -> str:
    text = bare_name(name).replace("\\", "/").rstrip("/").casefold()
    cached = _CACHED.search(text)
    text = cached[1] if cached else text.rpartition("/")[2]
    text = _SEPARATORS.sub("-", text.removesuffix(":latest").removesuffix(".gguf"))
    text = _SPLIT_FILE.sub("", text)
    while (shorter := _FORMAT.sub("", text)) not in (text, ""):
        text = shorter
    return text


@cache
def _known() -> dict[str, str]:
    """The store's own table, from every repository and short name to the model's name."""
    repositories = {_plain(each): _plain(name) for name, found in ALIASES.items() for each in found}
    return repositories | {_plain(short): _plain(name) for short, name in SHORT_NAMES.items()}
