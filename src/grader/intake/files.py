"""Files of students: single notebooks, folders and ZIPs. Untrusted: sizes are bounded, paths never leave."""

import lzma
import stat
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO

import msgspec

from grader.errors import GraderError
from grader.intake.file_names import Owner, Roster, owner_of

_IGNORED = ("__MACOSX", ".ipynb_checkpoints")
_SUFFIXES = {".ipynb"}
_READ_BYTES = 1 << 16
# What the decoders raise for content that is damaged, encrypted or made by hand.
_BROKEN_ZIP = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError, ValueError, OSError)


class FileRefused(GraderError):
    """A file or a ZIP that is not taken in."""


class IntakeLimits(msgspec.Struct, frozen=True, kw_only=True):
    file_bytes: int = 50 << 20
    archive_bytes: int = 2 << 30  # all files of a ZIP together, unpacked
    archive_files: int = 5000


class Incoming(msgspec.Struct, frozen=True, kw_only=True):
    owner: Owner
    file_name: str
    content: bytes


def read_files(paths: list[Path], roster: Roster, limits: IntakeLimits = IntakeLimits()) -> Iterator[Incoming]:
    """Every notebook in the files, folders and ZIPs. A file that is named itself is taken whatever it is."""
    for path in paths:
        if not path.exists():
            raise FileRefused(f"{path} does not exist")
        if path.is_dir():
            yield from _folder(path, roster, limits)
        elif zipfile.is_zipfile(path):
            with path.open("rb") as file:
                yield from read_archive(file, path.name, roster, limits)
        else:
            yield _incoming(path.name, _bounded(path, limits), roster)


def read_uploads(
    files: Iterable[tuple[str, IO[bytes]]], roster: Roster, limits: IntakeLimits = IntakeLimits()
) -> Iterator[Incoming]:
    """Names and contents as a browser sends them. Nothing is written to disk."""
    for name, file in files:
        if zipfile.is_zipfile(file):
            yield from read_archive(file, name, roster, limits)
            continue
        file.seek(0)
        content = file.read(limits.file_bytes + 1)
        if len(content) > limits.file_bytes:
            raise FileRefused(f"{name} has more than {limits.file_bytes >> 20} MiB")
        yield _incoming(PurePosixPath(name.replace("\\", "/")).name, content, roster)


def _folder(folder: Path, roster: Roster, limits: IntakeLimits) -> Iterator[Incoming]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not path.is_file() or not _is_wanted(name):
            continue
        yield _incoming(name, _bounded(path, limits), roster)


def _bounded(path: Path, limits: IntakeLimits) -> bytes:
    if (size := path.stat().st_size) > limits.file_bytes:
        raise FileRefused(f"{path.name} has {size >> 20} MiB; the limit is {limits.file_bytes >> 20} MiB")
    return path.read_bytes()


def read_archive(
    file: IO[bytes], name: str, roster: Roster, limits: IntakeLimits = IntakeLimits()
) -> Iterator[Incoming]:
    """Nothing is unpacked to disk. What the ZIP says of its sizes is not believed: bytes are counted."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = [entry for entry in archive.infolist() if not entry.is_dir()]
            if len(entries) > limits.archive_files:
                raise FileRefused(f"{name} has {len(entries)} files; the limit is {limits.archive_files}")
            left = limits.archive_bytes
            for entry in entries:
                if _is_wanted(entry.filename) and not _is_link(entry):
                    content = _unpacked(archive, entry, name, min(left, limits.file_bytes))
                    left -= len(content)
                    yield _incoming(entry.filename.replace("\\", "/"), content, roster)
    except _BROKEN_ZIP as error:
        raise FileRefused(f"{name} cannot be unpacked: {error}") from None


def _unpacked(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, name: str, limit: int) -> bytes:
    pieces, size = [], 0
    with archive.open(entry) as stream:
        while piece := stream.read(_READ_BYTES):
            size += len(piece)
            if size > limit:
                raise FileRefused(f"{name}: a file in it unpacks to more than {limit >> 20} MiB")
            pieces.append(piece)
    return b"".join(pieces)


def _is_wanted(path: str) -> bool:
    pure = PurePosixPath(path)
    hidden = pure.name.startswith(".") or any(part in _IGNORED for part in pure.parts)
    return pure.suffix.lower() in _SUFFIXES and not hidden


def _is_link(entry: zipfile.ZipInfo) -> bool:
    return stat.S_ISLNK(entry.external_attr >> 16)


def _incoming(path: str, content: bytes, roster: Roster) -> Incoming:
    """The path only names the student: no file of that name is ever opened or written. Names of a disk may have bytes
    that are no text."""
    path = path.encode("utf-8", "replace").decode()
    return Incoming(owner=owner_of(path, roster), file_name=PurePosixPath(path).name, content=content)
