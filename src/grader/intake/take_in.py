"""Files into the grade book. Nothing is dropped: of two files of one student the newest counts, and both are kept."""

from collections.abc import Iterable

import msgspec

from grader.intake.files import FileRefused, Incoming
from grader.store import Assignment, Database, add_submission, history, submissions


class TakenIn(msgspec.Struct, frozen=True, kw_only=True):
    """`replaced`: an older file of the same student is there. `decided`: of these older files, those with decisions of
    a person, which stay with the older file."""

    files: int
    new: int
    replaced: int
    decided: int = 0

    def told(self) -> str:
        words = f"{self.files} files, {self.new} of them new, {self.replaced} replace older ones"
        if self.decided:
            words += f"; {self.decided} of the older ones have decisions of yours: look at the new files yourself"
        return words


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
    replaced = {pseudonym for pseudonym in new if pseudonym in known}
    decided = sum(bool(history(database, each)) for each, pseudonym in before.items() if pseudonym in replaced)
    return TakenIn(files=len(files), new=len(new), replaced=len(replaced), decided=decided)


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
