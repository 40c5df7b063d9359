"""One file of a student on its way in. A file that cannot be read still names a student, who must not be lost."""

import hashlib
from pathlib import PurePosixPath

import msgspec

from grader.errors import GraderError
from grader.intake.file_names import Owner, Roster, owner_of

_IGNORED = ("__MACOSX", ".ipynb_checkpoints")
_SUFFIXES = {".ipynb"}


class FileRefused(GraderError):
    """A file or a ZIP that is not taken in."""


class IntakeLimits(msgspec.Struct, frozen=True, kw_only=True):
    file_bytes: int = 50 << 20
    archive_bytes: int = 2 << 30  # all files of a ZIP together, unpacked
    archive_files: int = 5000

    def too_big(self) -> str:
        return f"it has more than {self.file_bytes >> 20} MiB"


class Incoming(msgspec.Struct, frozen=True, kw_only=True):
    """`problem`: why the content is a note of ours and not the file's. `stray`: no notebook, found beside others."""

    owner: Owner
    file_name: str
    content: bytes
    problem: str = ""
    stray: bool = False


def is_hidden(path: str) -> bool:
    pure = PurePosixPath(path)
    return pure.name.startswith(".") or any(part in _IGNORED for part in pure.parts)


def incoming(path: str, content: bytes, roster: Roster) -> Incoming:
    """The path only names the student: no file of that name is ever opened or written. Names of a disk may have bytes
    that are no text."""
    path = path.encode("utf-8", "replace").decode()
    return Incoming(owner=owner_of(path, roster), file_name=PurePosixPath(path).name, content=content)


def unread(path: str, size: int, problem: str, roster: Roster, stray: bool = False) -> Incoming:
    """A submission that no layer can read. Its note differs from file to file: equal ones would look copied."""
    sign = hashlib.sha256(f"{size} {path}".encode("utf-8", "replace")).hexdigest()[:16]
    note = f"The content of this file was not taken in: {problem}. {sign}\n"
    return msgspec.structs.replace(incoming(path, note.encode(), roster), problem=problem, stray=stray)


def stray(path: str, size: int, roster: Roster) -> Incoming | None:
    """Of a file that is no notebook by its name. None: it is one."""
    if PurePosixPath(path).suffix.lower() in _SUFFIXES:
        return None
    return unread(path, size, "it is no notebook", roster, stray=True)
