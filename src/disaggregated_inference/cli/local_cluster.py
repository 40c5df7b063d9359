"""The cluster file of `disagg up`: two nodes of this machine."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from disaggregated_inference.defaults import DECODE_PORT, PREFILL_PORT
from disaggregated_inference.models import default_home
from disaggregated_inference.private_files import make_private_folder, private_opener


class LocalServer(msgspec.Struct, frozen=True):
    """One entry of the file."""

    name: str
    port: int
    model: str
    engine: str
    host: str = "127.0.0.1"
    power_w: float | None = None  # of a simulated machine, as published
    idle_power_w: float | None = None


_DEFAULT = (
    LocalServer("prefill", PREFILL_PORT, "smollm2:135m", "torch"),
    LocalServer("decode", DECODE_PORT, "smollm2:135m", "mlx"),
)


def read_cluster_file() -> str:
    """Of the newest `disagg up` that runs, else of the last one; before the first one, what it would use."""
    try:
        return (_running_file() or _folder() / "cluster.json").read_text(encoding="utf-8")
    except FileNotFoundError:
        return _text(*_DEFAULT)


@contextmanager
def cluster_file(prefill: LocalServer, decode: LocalServer, gbps: float | None = None) -> Iterator[Path]:
    """A file of this process, while its cluster runs: a second `disagg up` must not change it. A copy stays. `gbps`:
    the line rate between simulated machines."""
    text = _text(prefill, decode, gbps)
    make_private_folder(_folder())
    path, last = _folder() / f"{os.getpid()}.json", _folder() / "cluster.json"
    new = last.with_suffix(f".{os.getpid()}")
    try:
        for each in (path, new):
            with open(each, "w", encoding="utf-8", opener=private_opener) as file:
                file.write(text)
        new.replace(last)
        yield path
    finally:
        path.unlink(missing_ok=True)
        new.unlink(missing_ok=True)


def _folder() -> Path:
    return default_home() / "up"


def _running_file() -> Path | None:
    files = [path for path in _folder().glob("*.json") if path.stem.isdigit() and _is_running(int(path.stem))]
    return max(files, key=lambda path: path.stat().st_mtime, default=None)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    return True


def short_name(model: str) -> str:
    """Of a model that was given as a path: its last part."""
    return model.rstrip("/").rpartition("/")[2] if os.sep in model else model


def _text(prefill: LocalServer, decode: LocalServer, gbps: float | None = None) -> str:
    content: dict[str, Any] = {"prefill_servers": [_entry(prefill)], "decode_servers": [_entry(decode)]}
    if gbps:
        content["links"] = [{"prefill": prefill.name, "decode": decode.name, "gbps": gbps}]
    if os.environ.get("DISAGG_IDENTITY"):  # these nodes have none
        for server in content["prefill_servers"] + content["decode_servers"]:
            server["tls"] = False
    if (short := short_name(prefill.model)) != prefill.model:
        content["models"] = {prefill.model: {"aliases": [short]}}
    return json.dumps(content, indent=2) + "\n"


def _entry(server: LocalServer) -> dict[str, Any]:
    return {name: value for name, value in msgspec.to_builtins(server).items() if value is not None}
