"""Files of students: single notebooks, folders and ZIPs. Untrusted: sizes are bounded, paths never leave."""

import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from grader.intake.archives import read_archive
from grader.intake.file_names import Roster
from grader.intake.incoming import FileRefused, Incoming, IntakeLimits, incoming, is_hidden, stray, unread


def read_files(paths: list[Path], roster: Roster, limits: IntakeLimits = IntakeLimits()) -> Iterator[Incoming]:
    """Every file in the files, folders and ZIPs. A file that is named itself is taken whatever it is."""
    for path in paths:
        if not path.exists():
            raise FileRefused(f"{path} does not exist")
        if path.is_dir():
            yield from _folder(path, roster, limits)
        elif zipfile.is_zipfile(path):
            with path.open("rb") as file:
                yield from read_archive(file, path.name, roster, limits)
        else:
            yield _of_disk(path, path.name, roster, limits)


def read_uploads(
    files: Iterable[tuple[str, IO[bytes]]], roster: Roster, limits: IntakeLimits = IntakeLimits()
) -> Iterator[Incoming]:
    """Names and contents as a browser sends them. Nothing is written to disk."""
    for name, file in files:
        if zipfile.is_zipfile(file):
            yield from read_archive(file, name, roster, limits)
            continue
        file.seek(0)
        yield _bounded(file, PurePosixPath(name.replace("\\", "/")).name, roster, limits)


def _folder(folder: Path, roster: Roster, limits: IntakeLimits) -> Iterator[Incoming]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not path.is_file() or is_hidden(name):
            continue
        yield stray(name, path.stat().st_size, roster) or _of_disk(path, name, roster, limits)


def _of_disk(path: Path, name: str, roster: Roster, limits: IntakeLimits) -> Incoming:
    try:
        with path.open("rb") as file:
            return _bounded(file, name, roster, limits)
    except OSError as error:
        return unread(name, 0, f"it cannot be read ({error.strerror})", roster)


def _bounded(file: IO[bytes], name: str, roster: Roster, limits: IntakeLimits) -> Incoming:
    content = file.read(limits.file_bytes + 1)
    if len(content) > limits.file_bytes:
        return unread(name, file.seek(0, 2), limits.too_big(), roster)
    return incoming(name, content, roster)
