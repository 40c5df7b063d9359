"""Files with prompts, completions or secrets: only their owner may read them, whatever the umask is.

Files from earlier versions that others can read are corrected when they are used next.
"""

import logging
import os
import stat
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def make_folders(folder: Path) -> None:
    """Made if it is missing, and what is missing above it, each for its owner alone. One that exists stays as it is."""
    if not folder.is_dir():
        make_folders(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def make_private_folder(folder: Path) -> None:
    """Made if it is missing, as `make_folders` does; others lose their rights in one that exists."""
    make_folders(folder)
    make_private(folder)


def warn_of_open(folder: Path) -> None:
    """One that its user made, or an earlier version. It stays as it is: others may need it."""
    with suppress(OSError):
        if stat.S_IMODE(folder.stat().st_mode) & _OTHERS:
            log.warning(
                "other users can list %s: run `chmod 700 %s`, or set DISAGG_HOME to another folder", folder, folder
            )


def make_private_file(path: Path) -> None:
    """Made if it is missing."""
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    make_private(path)


def private_opener(path: str, flags: int) -> int:
    """For `open(..., opener=private_opener)`."""
    return os.open(path, flags, 0o600)


def make_private(*paths: Path) -> None:
    """Takes other users' rights away. A file that is not ours to correct costs a warning."""
    for path in paths:
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode & _OTHERS:
                path.chmod(mode & ~_OTHERS)
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("other users can read %s: %s; `chmod go= %s` as its owner", path, error.strerror, path)
