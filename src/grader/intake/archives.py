"""ZIPs of students' files. Untrusted: sizes are counted while unpacking, paths never leave."""

import lzma
import stat
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO

from grader.intake.file_names import Roster
from grader.intake.incoming import FileRefused, Incoming, IntakeLimits, incoming, is_hidden, stray, unread

_READ_BYTES = 1 << 16
# What the decoders raise for content that is damaged, encrypted or made by hand.
_BROKEN_ZIP = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError, ValueError, OSError)


def read_archive(
    file: IO[bytes], name: str, roster: Roster, limits: IntakeLimits = IntakeLimits()
) -> Iterator[Incoming]:
    """Nothing is unpacked to disk. One bad file is one unreadable submission; a ZIP that is damaged as a whole, or too
    big, is refused."""
    try:
        with zipfile.ZipFile(file) as archive:
            yield from _entries(archive, name, roster, limits)
    except _BROKEN_ZIP as error:
        raise FileRefused(f"{name} cannot be unpacked: {error}") from None


def _entries(archive: zipfile.ZipFile, name: str, roster: Roster, limits: IntakeLimits) -> Iterator[Incoming]:
    entries = [entry for entry in archive.infolist() if not entry.is_dir()]
    if len(entries) > limits.archive_files:
        raise FileRefused(f"{name} has {len(entries)} files; the limit is {limits.archive_files}")
    left = limits.archive_bytes
    for entry in entries:
        path = entry.filename.replace("\\", "/")
        if is_hidden(path) or _is_link(entry):
            continue
        if other := stray(path, entry.file_size, roster):
            yield other
            continue
        content, problem = _unpacked(archive, entry, min(left, limits.file_bytes), limits)
        left -= len(content)
        if left < 0:
            raise FileRefused(f"{name} unpacks to more than {limits.archive_bytes >> 20} MiB")
        yield unread(path, entry.file_size, problem, roster) if problem else incoming(path, bytes(content), roster)


def _unpacked(
    archive: zipfile.ZipFile, entry: zipfile.ZipInfo, limit: int, limits: IntakeLimits
) -> tuple[bytearray, str]:
    """What was unpacked, and what is wrong with it. What the ZIP says of its sizes is not believed: reading ends one
    piece after the limit."""
    content = bytearray()
    try:
        with archive.open(entry) as stream:
            while piece := stream.read(_READ_BYTES):
                content += piece
                if len(content) > limit:
                    return content, limits.too_big()
    except _BROKEN_ZIP:  # its text may name the student
        return content, "it is damaged or encrypted"
    return content, ""


def _is_link(entry: zipfile.ZipInfo) -> bool:
    return stat.S_ISLNK(entry.external_attr >> 16)
