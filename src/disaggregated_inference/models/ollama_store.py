"""What an Ollama on this machine has pulled: GGUF files, by the names that Ollama has for them.

A manifest lists a model's layers; each lies in `blobs` under its hash. Only read, never written.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

_WEIGHTS, _ADAPTER = (f"application/vnd.ollama.image.{kind}" for kind in ("model", "adapter"))
_SERVICE = Path("/usr/share/ollama/.ollama/models")  # of the user that its installer makes on Linux


def find(name: str) -> Path | None:
    """The weights of `qwen3-coder:30b` or `hf.co/someone/model`; of `latest` where no tag is said, as Ollama has it."""
    wanted = name if ":" in name else f"{name}:latest"
    return next((path for found, path in pulled() if found == wanted.lower()), None)


def pulled() -> Iterator[tuple[str, Path]]:
    """All that could be loaded from there."""
    for root in _roots():
        for manifest in _manifests(root):
            if weights := _weights(root, manifest):
                yield _name(manifest).lower(), weights


def _roots() -> list[Path]:
    if said := os.environ.get("OLLAMA_MODELS"):
        return [Path(said).expanduser()]
    return [Path("~/.ollama/models").expanduser(), _SERVICE]


def _manifests(root: Path) -> list[Path]:
    """None, where another user's store is closed to us."""
    try:
        return sorted(root.glob("manifests/*/*/*/*"))
    except OSError:
        return []


def _name(manifest: Path) -> str:
    """As `ollama list` has it: without the place that it pulls from unless told otherwise."""
    place, owner, model, tag = manifest.parts[-4:]
    whose = "" if owner == "library" else f"{owner}/"
    return ("" if place.startswith("registry.") else f"{place}/") + f"{whose}{model}:{tag}"


def _weights(root: Path, manifest: Path) -> Path | None:
    """None where the model is more than one file of weights: it would not be the model that Ollama serves."""
    try:
        layers = [(layer["mediaType"], layer["digest"]) for layer in json.loads(manifest.read_bytes())["layers"]]
        digests = [digest for kind, digest in layers if kind == _WEIGHTS]
        if len(digests) != 1 or any(kind == _ADAPTER for kind, _ in layers):
            return None
        path = root / "blobs" / str(digests[0]).replace(":", "-")
        return path if path.is_file() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
