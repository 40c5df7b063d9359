"""GGUF files that an Ollama on this machine has pulled, by Ollama's names.

A manifest lists a model's layers; each is in `blobs` under its hash. The store is never written.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

_WEIGHTS, _ADAPTER = (f"application/vnd.ollama.image.{kind}" for kind in ("model", "adapter"))
_SERVICE = Path("/usr/share/ollama/.ollama/models")  # of the user that Ollama's installer creates on Linux


def find(name: str) -> Path | None:
    """The weights of `qwen3-coder:30b` or `hf.co/owner/model`; the default tag is `latest`, as in Ollama."""
    wanted = name if ":" in name else f"{name}:latest"
    return next((path for found, path in pulled() if found == wanted.lower()), None)


def pulled() -> Iterator[tuple[str, Path]]:
    """All models with a single file of weights."""
    for root in _roots():
        for manifest in _manifests(root):
            if weights := _weights(root, manifest):
                yield _name(manifest).lower(), weights


def _roots() -> list[Path]:
    if configured := os.environ.get("OLLAMA_MODELS"):
        return [Path(configured).expanduser()]
    return [Path("~/.ollama/models").expanduser(), _SERVICE]


def _manifests(root: Path) -> list[Path]:
    """Empty if another user's store is not readable."""
    try:
        return sorted(root.glob("manifests/*/*/*/*"))
    except OSError:
        return []


def _name(manifest: Path) -> str:
    """The name in `ollama list`: without the default registry and the default owner."""
    host, owner, model, tag = manifest.parts[-4:]
    prefix = "" if owner == "library" else f"{owner}/"
    return ("" if host.startswith("registry.") else f"{host}/") + f"{prefix}{model}:{tag}"


def _weights(root: Path, manifest: Path) -> Path | None:
    """None if the model has several files of weights or an adapter: one file would be another model."""
    try:
        layers = [(layer["mediaType"], layer["digest"]) for layer in json.loads(manifest.read_bytes())["layers"]]
        digests = [digest for kind, digest in layers if kind == _WEIGHTS]
        if len(digests) != 1 or any(kind == _ADAPTER for kind, _ in layers):
            return None
        path = root / "blobs" / str(digests[0]).replace(":", "-")
        return path if path.is_file() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
