"""The names that the user gave to models: `models.json`, and which of them are copies that the store made.

Several processes may change it at once: each holds a lock from reading to writing, and replaces the file as a whole.
"""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from disaggregated_inference.errors import ModelDamaged
from disaggregated_inference.models.embedded import only_one
from disaggregated_inference.models.tokenizer import read_json

FileKind = Literal["safetensors", "gguf"]


class RegisteredName(msgspec.Struct, omit_defaults=True):
    """What one name stands for. Only what is `copied` may ever be deleted."""

    gguf: str = ""
    safetensors: str = ""
    copied: list[FileKind] = []

    def paths(self) -> dict[FileKind, str]:
        both: dict[FileKind, str] = {"gguf": self.gguf, "safetensors": self.safetensors}
        return {kind: path for kind, path in both.items() if path}

    def put(self, kind: FileKind, path: Path, copied: bool) -> None:
        setattr(self, kind, str(path))
        self.copied = [each for each in self.copied if each != kind] + ([kind] if copied else [])

    def copy_of(self, kind: FileKind) -> Path | None:
        """The folder that was made for it."""
        if kind not in self.copied:
            return None
        path = Path(self.paths()[kind])
        return path.parent if kind == "gguf" else path


Names = dict[str, RegisteredName]


def bare_name(name: str) -> str:
    """Programs name models as `disaggregated:qwen3-coder:30b`."""
    return name.strip().removeprefix("disaggregated:").strip()


def read_names(file: Path) -> Names:
    return {name: _named(file, name, told) for name, told in read_json(file).items()}


def _named(file: Path, name: str, told: object) -> RegisteredName:
    try:
        named = msgspec.convert(told, RegisteredName)
    except msgspec.ValidationError as error:
        raise ModelDamaged(f"{file}: {name!r} is not as `disagg models import` writes it: {error}") from error
    if lost := set(named.copied) - named.paths().keys():
        raise ModelDamaged(f"{file}: {name!r} has a copy of its {lost.pop()} without a path")
    return named


@contextmanager
def changing(file: Path) -> Iterator[Names]:
    """What is read here, and changed by the caller, is written again; nobody else writes meanwhile."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with only_one(file.with_suffix(".lock")):
        names = read_names(file)
        yield names
        with tempfile.NamedTemporaryFile("w", prefix="models-", dir=file.parent, delete=False) as partial:
            partial.write(json.dumps(msgspec.to_builtins(names), indent=2) + "\n")
        os.chmod(partial.name, 0o644)
        os.replace(partial.name, file)
