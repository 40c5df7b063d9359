"""The cluster that the clients talk to: torch reads, MLX writes, a gateway in front, all on this machine."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from disaggregated_inference.local_nodes import LocalNode, Process, disagg, running
from disaggregated_inference.models import ModelStore

MODEL = "smollm2"
_TEMPLATE = Path(__file__).parent / "chat_template.jinja"
_WINDOW = 8192
_SHARED = ("--dtype", "float32", "--kv-memory", "512M")


@contextmanager
def gateway() -> Iterator[tuple[str, Path]]:
    """The gateway's address and the model's folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = _model_with_tools(Path(name) / MODEL)
        nodes = [LocalNode(role, engine, "--model", str(folder), *_SHARED) for role, engine in _ROLES.items()]
        with running(nodes):
            config = Path(name) / "cluster.json"
            config.write_text(json.dumps(_config(nodes)))
            front = Process("the gateway", disagg("gateway", "--config", str(config), "--port", "0"))
            with running([front]):
                yield front.url, folder


_ROLES = {"prefill": "torch", "decode": "mlx"}


def _model_with_tools(folder: Path) -> Path:
    """The embedded model. Its own chat template has no tools, and Ollama's API refuses them then."""
    folder.mkdir()
    for file in ModelStore().resolve(MODEL).path.iterdir():
        os.symlink(file, folder / file.name)
    (folder / _TEMPLATE.name).unlink(missing_ok=True)
    shutil.copy(_TEMPLATE, folder)
    return folder


def _config(nodes: list[LocalNode]) -> dict[str, Any]:
    """`local: never`: every prompt is read by the prefill node, however short it is."""
    config: dict[str, Any] = {
        f"{node.role}_servers": [
            {"name": f"{node.engine}-1", "host": "127.0.0.1", "port": int(node.url.rpartition(":")[2]), "model": MODEL}
        ]
        for node in nodes
    }
    return config | {"policies": {"local": "never"}, "models": {MODEL: {"aliases": ["qwen"]}}}
