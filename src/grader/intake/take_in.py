"""Files into the grade book. Nothing is dropped: of two files of one student the newest counts, and both are kept."""

from collections.abc import Iterable

import msgspec

from grader.intake.files import FileRefused, Incoming
from grader.store import Assignment, Database, add_submission, submissions


class TakenIn(msgspec.Struct, frozen=True, kw_only=True):
    """`replaced`: an older file of the same student is there."""

    files: int
    new: int
    replaced: int


def take_in(database: Database, assignment: Assignment, incoming: Iterable[Incoming]) -> TakenIn:
    files = sorted(incoming, key=lambda one: one.owner.order)
    _refuse_clashes(files)
    before = {one.id: one.pseudonym for one in submissions(database, assignment.id)}
    for one in files:
        add_submission(
            database, assignment.id, one.owner.identity, one.file_name, one.content, late_days=one.owner.late_days
        )
    now = {one.id: one.pseudonym for one in submissions(database, assignment.id)}
    new = [now[found] for found in now if found not in before]
    known = set(before.values())
    return TakenIn(files=len(files), new=len(new), replaced=sum(pseudonym in known for pseudonym in new))


def _refuse_clashes(files: list[Incoming]) -> None:
    """Two students whose files have the same name must not become one."""
    seen: dict[str, bytes] = {}
    for one in files:
        key = one.owner.identity.key
        if one.owner.plain and seen.setdefault(key, one.content) != one.content:
            raise FileRefused(
                f"two different files are named {one.file_name}: give each student's file a name of its own,"
                " or give the folder or ZIP above them"
            )
