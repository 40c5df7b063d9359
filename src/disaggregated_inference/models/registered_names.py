"""`models.json`: the names that the user registered for models, and which of them are copies in the store.

Several processes may change it at once: each holds a lock from reading to writing, and replaces the file atomically.
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
from disaggregated_inference.models.embedded import file_lock
from disaggregated_inference.models.tokenizer import read_json
from disaggregated_inference.private_files import make_folders

FileKind = Literal["safetensors", "gguf"]


class RegisteredName(msgspec.Struct, omit_defaults=True):
    """The paths of one name. Only those in `copied` may be deleted."""

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
        """The folder of the store's copy, if there is one."""
        if kind not in self.copied:
            return None
        path = Path(self.paths()[kind])
        return path.parent if kind == "gguf" else path


Names = dict[str, RegisteredName]


def bare_name(name: str) -> str:
    """Without the prefix of `disaggregated:qwen3-coder:30b`."""
    return name.strip().removeprefix("disaggregated:").strip()


def read_names(file: Path) -> Names:
    return {name: _decode(file, name, entry) for name, entry in read_json(file).items()}


def _decode(file: Path, name: str, entry: object) -> RegisteredName:
    try:
        named = msgspec.convert(entry, RegisteredName)
    except msgspec.ValidationError as error:
        raise ModelDamaged(f"{file}: the entry {name!r} is invalid: {error}") from error
    if missing := set(named.copied) - named.paths().keys():
        raise ModelDamaged(f"{file}: {name!r} has a copy of its {missing.pop()} without a path")
    return named


@contextmanager
def edit_names(file: Path) -> Iterator[Names]:
    """Read the names, let the caller change them, write them back; under a lock."""
    make_folders(file.parent)
    with file_lock(file.with_suffix(".lock")):
        names = read_names(file)
        yield names
        with tempfile.NamedTemporaryFile("w", prefix="models-", dir=file.parent, delete=False) as partial:
            partial.write(json.dumps(msgspec.to_builtins(names), indent=2) + "\n")
        os.chmod(partial.name, 0o644)
        os.replace(partial.name, file)
