"""Input files that the sandbox's user can read."""

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def readable(inputs: Path | None) -> Iterator[Path | None]:
    """The folder itself, or a copy where only its owner may read: as root, the sandbox runs as another user."""
    if inputs is None or os.geteuid() != 0 or all(_is_open(path) for path in [inputs, *inputs.rglob("*")]):
        yield inputs
        return
    with tempfile.TemporaryDirectory(prefix="grader-inputs-") as folder:
        copy = Path(folder) / "inputs"
        shutil.copytree(inputs, copy, ignore=_links)
        for path in [Path(folder), copy, *copy.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield copy


def _is_open(path: Path) -> bool:
    if path.is_symlink():
        return True  # links are left out
    wanted = stat.S_IROTH | stat.S_IXOTH if path.is_dir() else stat.S_IROTH
    return path.stat().st_mode & wanted == wanted


def _links(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if os.path.islink(os.path.join(folder, name))]
