"""The model store: resolves a model's name to files on this machine.

Search order: a name registered with `disagg models import`; the embedded model; a simulated model; a path; an alias
(`qwen3-coder:30b`) or a repository name, in the store's folder and in the Hugging Face cache; a model of an Ollama on
this machine, which comes before aliases if a GGUF is wanted. Only the embedded model is ever downloaded.
"""

import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from disaggregated_inference.errors import ModelExists, ModelNotFound, ModelUnsupported
from disaggregated_inference.kv import Fingerprint, Weights
from disaggregated_inference.models import embedded, ollama_store, simulated
from disaggregated_inference.models.completeness import find_shards, require_complete_folder
from disaggregated_inference.models.convert import OnStep, config_from_gguf, hash_gguf, stored
from disaggregated_inference.models.gguf import GGUFFile, is_gguf, is_later_part
from disaggregated_inference.models.gguf_tokenizer import tokenizer_from_gguf
from disaggregated_inference.models.registered_names import FileKind, RegisteredName, bare_name, edit_names, read_names
from disaggregated_inference.models.safetensors import StoredTensor, read_tensors
from disaggregated_inference.models.spec import ModelSpec, spec_from_config
from disaggregated_inference.models.tokenizer import TOKENIZER_FILES, ModelTokenizer, read_json
from disaggregated_inference.models.weights_hash import hash_weights
from disaggregated_inference.private_files import make_folders

EMBEDDED = "smollm2:135m"
_EMBEDDED_FOLDER = "smollm2-135m"

# Repositories of a model: full precision first, then quantizations for MLX.
ALIASES: dict[str, tuple[str, ...]] = {
    "qwen3-coder:30b": (
        "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        "Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8",
        "mlx-community/Qwen3-Coder-30B-A3B-Instruct-8bit",
        "mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit",
    ),
    "gpt-oss:120b": ("openai/gpt-oss-120b", "mlx-community/gpt-oss-120b-MXFP4-Q8"),
    "gpt-oss:20b": ("openai/gpt-oss-20b", "mlx-community/gpt-oss-20b-MXFP4-Q8"),
}
SHORT_NAMES = {"smollm2": EMBEDDED, "qwen3-coder": "qwen3-coder:30b", "gpt-oss": "gpt-oss:120b"}


# The kind of files that each engine loads.
ENGINE_FILES: dict[str, FileKind] = {"torch": "safetensors", "mlx": "safetensors", "llamacpp": "gguf"}


class ModelFiles:
    """A model on this machine. Everything that takes time is read lazily."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path
        self.kind: FileKind = "safetensors" if path.is_dir() else "gguf"

    @cached_property
    def config(self) -> dict[str, Any]:
        if self.kind == "gguf":
            return config_from_gguf(self._gguf)
        config = read_json(self.path / "config.json")
        generation = read_json(self.path / "generation_config.json")
        if "eos_token_id" in generation:
            config["eos_token_id"] = generation["eos_token_id"]
        return config

    @cached_property
    def simulated(self) -> str:
        """The shape of a simulated model, which has no weights; empty for real models."""
        return "" if self.kind == "gguf" else str(self.config.get("simulated", ""))

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines that can load these files."""
        if self.simulated:
            return ("simulated",)
        return ("llamacpp",) if self.kind == "gguf" else _loaders(self.quantization)

    @property
    def quantization(self) -> str:
        """The quantization method of a folder; MLX's has no name in the config."""
        settings = self.config.get("quantization_config") or self.config.get("quantization")
        method = settings.get("quant_method") if isinstance(settings, dict) else None
        return str(method or "mlx") if settings else ""

    @property
    def size_bytes(self) -> int:
        """Size of the weights on disk."""
        files = self._gguf.parts if self.kind == "gguf" else list(self.path.glob("*.safetensors"))
        return sum(file.stat().st_size for file in files)

    @cached_property
    def spec(self) -> ModelSpec:
        return spec_from_config(self.config)

    @cached_property
    def tokenizer(self) -> ModelTokenizer:
        if self.kind == "safetensors":
            return ModelTokenizer.from_folder(self.path)
        if (self.path.parent / "tokenizer.json").is_file():
            return ModelTokenizer.from_folder(self.path.parent)
        return tokenizer_from_gguf(self._gguf)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        return self.spec.fingerprint(
            tokenizer=self.tokenizer.identity,
            chat_template=self.tokenizer.template_identity,
            weights=hash_gguf(self._gguf) if self.kind == "gguf" else self._hash_safetensors(),
        )

    @cached_property
    def _gguf(self) -> GGUFFile:
        return GGUFFile(self.path)

    def _hash_safetensors(self) -> Weights:
        if self.simulated:
            return simulated.hash_config(self.config)
        quantization = self.config.get("quantization") or self.config.get("quantization_config")
        stored_as = json.dumps(quantization, sort_keys=True) if quantization else None
        tensors = self.tensors()
        names = {tensor.name for tensor in tensors}
        require_complete_folder(self.path, self.spec.architecture, len(self.spec.layout.layers), names)
        return hash_weights(tensors, stored_as)

    def tensors(self) -> list[StoredTensor]:
        """All tensors, memory-mapped, under their Hugging Face names."""
        if self.kind == "gguf":
            return [stored(self._gguf, name) for name in self._gguf.tensors]
        return [tensor for path in find_shards(self.path) for tensor in read_tensors(path)]


def _loaders(quantization: str) -> tuple[str, ...]:
    """transformers needs accelerate for FP8 and MXFP4; mlx-lm does not load FP8 of these architectures."""
    if quantization == "mlx":
        return ("mlx",)
    torch = quantization not in ("fp8", "mxfp4") or importlib.util.find_spec("accelerate") is not None
    return (("torch",) if torch else ()) + (("mlx",) if quantization != "fp8" else ())


class ListedModel(NamedTuple):
    """A row of `disagg models`."""

    name: str
    path: Path | None
    note: str


class ModelStore:
    """Resolves names. `home` contains the embedded model and `models.json`."""

    def __init__(self, home: Path | None = None) -> None:
        self.home = (home or default_home()).absolute()
        self.root = self.home / "models"

    def resolve(self, name: str, progress: OnStep = embedded.quiet, kind: FileKind = "safetensors") -> ModelFiles:
        """Files for `name`, preferably of this kind. The error explains how to get the model."""
        wanted = bare_name(name)
        named = self.names.get(wanted, {})
        if kind in named:
            return _named(wanted, named[kind], kind)
        wanted = SHORT_NAMES.get(wanted.lower(), wanted)
        if wanted.lower() == EMBEDDED:
            ensure = embedded.ensure_gguf if kind == "gguf" else embedded.ensure_folder
            return ModelFiles(EMBEDDED, ensure(self.root, progress))
        if wanted.lower().startswith(simulated.PREFIX):
            return ModelFiles(wanted.lower(), simulated.ensure_folder(self.root, wanted))
        if path := self._local(wanted, kind):
            return ModelFiles(wanted, _require_model(path, kind))
        for path_of_another_kind in named.values():
            return _named(wanted, path_of_another_kind, kind)
        if path := self._local(wanted, "gguf"):  # for `inspect` and `verify`; loading it checks the kind
            return ModelFiles(wanted, _require_model(path, kind))
        raise ModelNotFound(self._how_to_get(wanted, kind))

    def engines(self, name: str) -> list[str]:
        """The engines that can load this model, from any of its files."""
        kinds: tuple[FileKind, ...] = ("safetensors", "gguf")
        return list(dict.fromkeys(engine for kind in kinds for engine in self.resolve(name, kind=kind).engines))

    def add(self, name: str, path: Path, copy: bool = False) -> ModelFiles:
        """Register a name for a folder or a GGUF file; a name may have both. `copy` copies it into the store."""
        name = bare_name(name)
        found = ModelFiles(name, _require_model(path.expanduser().absolute()))
        found.fingerprint  # noqa: B018  refuses unsupported and damaged models now, not when a node starts
        if copy:
            found = ModelFiles(name, self._copied(found))
        with edit_names(self._names_file) as names:
            named = names.setdefault(name, RegisteredName())
            if not copy:
                _require_no_copy(name, named, found)
            if named.paths().get(found.kind) != str(found.path) or copy:
                named.put(found.kind, found.path, copy)
        return found

    def remove(self, name: str) -> list[Path]:
        """Remove a name, and delete the copies that `add` made for it; all other files stay."""
        with edit_names(self._names_file) as names:
            name = name if name in names else bare_name(name)
            if name not in names:
                raise ModelNotFound(f"no imported model {name!r}; imported: {', '.join(names) or 'none'}")
            copies = self._copies(names.pop(name))
            for other, named in names.items():
                if any(copy in (Path(path), *Path(path).parents) for copy in copies for path in named.paths().values()):
                    raise ModelExists(f"{other} uses the copy of {name}: remove {other} first")
            for copy in copies:
                shutil.rmtree(copy)
        return copies

    def _copies(self, named: RegisteredName) -> list[Path]:
        """Only folders directly below the root, as `_copied` makes them, may be deleted."""
        made = [named.copy_of(kind) for kind in named.paths()]
        ours = [folder for folder in made if folder and folder.parent == self.root and not folder.is_symlink()]
        return [folder for folder in ours if folder.is_dir()]

    def _copied(self, model: ModelFiles) -> Path:
        """Atomic: an interrupted copy stays under a temporary name."""
        target = self.root / (_as_folder(model.name) + ("-gguf" if model.kind == "gguf" else ""))
        taken = f"{target} exists already: choose another name, or remove it first"
        if target.exists() or target.name == _EMBEDDED_FOLDER:
            raise ModelExists(taken)
        make_folders(self.root)
        with tempfile.TemporaryDirectory(prefix="copying-", dir=self.root) as scratch:
            partial = Path(scratch) / "model"
            if model.kind == "gguf":
                partial.mkdir()
                beside = [model.path.parent / name for name in TOKENIZER_FILES]
                for file in [*GGUFFile(model.path).parts, *(each for each in beside if each.is_file())]:
                    shutil.copy2(file, partial)
            else:
                shutil.copytree(model.path, partial)
            try:
                partial.rename(target)
            except OSError as error:  # another process made it meanwhile
                raise ModelExists(taken) from error
        return target / model.path.name if model.kind == "gguf" else target

    def list(self) -> list[ListedModel]:
        """Embedded, imported and simulated models, aliases, and models in the store, the Hugging Face cache, Ollama."""
        complete = embedded.is_complete(self.root / _EMBEDDED_FOLDER)
        rows = [
            ListedModel(EMBEDDED, self.root / _EMBEDDED_FOLDER if complete else None, "embedded, fetched on first use")
        ]
        rows += [_listed(name, Path(path)) for name, paths in sorted(self.names.items()) for path in paths.values()]
        rows += [ListedModel(name, self._alias(name), "alias of " + repos[0]) for name, repos in ALIASES.items()]
        rows += [
            ListedModel(name, self._simulated(name), "no weights, for --engine simulated")
            for name in simulated.SIMULATED_MODELS
        ]
        named = {path for paths in self.names.values() for path in paths.values()}  # including copies in the store
        rows += [ListedModel(name, path, "found") for name, path in self._found() if str(path) not in named]
        return rows + [
            ListedModel(name, path, "from Ollama, for --engine llamacpp") for name, path in ollama_store.pulled()
        ]

    @property
    def names(self) -> dict[str, dict[FileKind, str]]:
        """Registered names, each with its path per kind of files."""
        return {name: dict(named.paths()) for name, named in read_names(self._names_file).items()}

    @property
    def _names_file(self) -> Path:
        return self.home / "models.json"

    def _local(self, wanted: str, kind: FileKind) -> Path | None:
        if (path := Path(wanted).expanduser()).exists():
            return path.absolute()
        return (ollama_store.find(wanted) if kind == "gguf" else None) or self._alias(wanted)

    def _alias(self, wanted: str) -> Path | None:
        for repository in ALIASES.get(wanted.lower(), (wanted,)):
            if found := self._stored(repository) or _in_hugging_face_cache(repository):
                return found
        return None

    def _stored(self, repository: str) -> Path | None:
        for name in (repository, repository.rpartition("/")[2]):
            if name and (self.root / name / "config.json").is_file():
                return self.root / name
        return None

    def _simulated(self, name: str) -> Path | None:
        folder = simulated.folder_of(self.root, name)
        return folder if folder.is_dir() else None

    def _found(self) -> Iterator[tuple[str, Path]]:
        for config in sorted([*self.root.glob("*/config.json"), *self.root.glob("*/*/config.json")]):
            unfinished = config.parts[-3].startswith(("making-", "copying-"))
            if config.parent != self.root / _EMBEDDED_FOLDER and not unfinished:
                yield str(config.parent.relative_to(self.root)), config.parent
        for folder in sorted(_hugging_face_cache().glob("models--*--*")):
            _, org, name = folder.name.split("--", 2)
            if path := _in_hugging_face_cache(f"{org}/{name}"):
                yield f"{org}/{name}", path

    def _how_to_get(self, wanted: str, kind: FileKind) -> str:
        known = ", ".join(
            dict.fromkeys([EMBEDDED, *ALIASES, *self.names, *(name for name, _ in ollama_store.pulled())])
        )
        if kind == "gguf":
            return (
                f"no GGUF of {wanted!r} on this machine: not a path, not an imported name, not in Ollama."
                f" Import a file: `disagg models import /path/to/file.gguf --name {wanted}`, or"
                f" `ollama pull {wanted}`"
            )
        if repositories := ALIASES.get(wanted.lower()):
            return (
                f"model {wanted!r} is not on this machine. Fetch it with `hf download {repositories[0]}`, "
                f"or import a folder: `disagg models import /path/to/folder --name {wanted}`"
            )
        return (
            f"no model {wanted!r}: not a path, not in {self.root}, the Hugging Face cache or Ollama. "
            f"Known names: {known}. Give a folder with config.json and *.safetensors, or a .gguf file"
        )


def _named(name: str, path: str, kind: FileKind) -> ModelFiles:
    if not Path(path).exists():
        remedy = f"import it again, or `disagg models remove {name}`"
        raise ModelNotFound(f"{name} was imported from {path}, which does not exist any more: {remedy}")
    return ModelFiles(name, _require_model(Path(path), kind))


def _require_no_copy(name: str, named: RegisteredName, found: ModelFiles) -> None:
    """Replacing the path would lose track of the store's copy."""
    copy = named.copy_of(found.kind)
    if copy and copy.exists() and str(found.path) != named.paths()[found.kind]:
        raise ModelExists(f"{name} has a copy in {copy}: `disagg models remove {name}` first, or choose another name")


def _listed(name: str, path: Path) -> ListedModel:
    return ListedModel(name, path, f"imported, {ModelFiles(name, path).kind}" if path.exists() else "imported, missing")


def _as_folder(name: str) -> str:
    folder = "".join(character if character.isalnum() or character in "-._" else "-" for character in name)
    return folder.lstrip(".") or "model"


def default_home() -> Path:
    if home := os.environ.get("DISAGG_HOME"):
        return Path(home).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "disaggregated-inference"


def _hugging_face_cache() -> Path:
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache)
    return Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "hub"


def _in_hugging_face_cache(repository: str) -> Path | None:
    folder = _hugging_face_cache() / ("models--" + repository.replace("/", "--"))
    revision = folder / "refs" / "main"
    if not revision.is_file():
        return None
    snapshot = folder / "snapshots" / revision.read_text().strip()
    return snapshot if (snapshot / "config.json").is_file() or any(snapshot.glob("*.gguf")) else None


def _require_model(path: Path, kind: FileKind = "safetensors") -> Path:
    """The folder or file itself; a folder's only GGUF if that kind is wanted, or if the folder has nothing else."""
    if path.is_file() and (path.suffix == ".gguf" or is_gguf(path)):
        return path
    files = sorted(file for file in path.glob("*.gguf") if not is_later_part(file))
    if files and (kind == "gguf" or not (path / "config.json").is_file()):
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise ModelNotFound(f"{path} has {len(files)} GGUF models, name one of them: {names}")
        return files[0]
    if not path.is_dir():
        raise ModelNotFound(
            f"{path} does not exist" if not path.exists() else f"{path} is neither a folder nor a GGUF file"
        )
    if not (path / "config.json").is_file():
        raise ModelNotFound(f"{path} has no config.json: not a model folder")
    if not any(path.glob("*.safetensors")) and "simulated" not in read_json(path / "config.json"):
        raise ModelUnsupported(f"{path} has no *.safetensors files; convert the weights to safetensors")
    return path
