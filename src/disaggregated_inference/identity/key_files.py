"""The files of keys and certificates, written so that a crash leaves the old or the new content."""

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from disaggregated_inference.errors import ConfigError
from disaggregated_inference.private_files import make_private_folder

OTHER_FOLDER = "choose another folder with --keys or DISAGG_KEYS, or another home with DISAGG_HOME"
OPEN_TO_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time. A process that ends, or is killed, frees the lock; the empty file stays."""
    try:
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; {OTHER_FOLDER}") from error
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


def make_folder(path: Path) -> None:
    try:
        make_private_folder(path)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {path}: {error.strerror}; {OTHER_FOLDER}") from error


def write_private(path: Path, content: bytes) -> None:
    """With mode 0600, all at once."""
    try:
        number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(number, "wb") as file:  # mkstemp makes files with mode 0600
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; make room there, or {OTHER_FOLDER}") from error


def read_private(path: Path, what: str) -> bytes:
    """`what`: what the file is, for the message."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing: {what}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; it must belong to this user") from error


def exposed(path: Path) -> str:
    """A warning if other users may read the file; else empty."""
    if path.stat().st_mode & OPEN_TO_OTHERS:
        return f"other users of this machine can read {path}: run `chmod 600 {path}`"
    return ""
