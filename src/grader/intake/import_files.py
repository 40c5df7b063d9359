"""Files into the grade book. Nothing is dropped: of a student's files the newest counts, and all are kept."""

import hashlib
from collections.abc import Iterable, Iterator

import msgspec

from grader.intake.file_names import owner_of
from grader.intake.incoming import FileRefused, Incoming
from grader.store import Assignment, Database, KnownFile, add_submission, history, known_files, submissions

_NAMED = 5  # students in a message; then a count


class TakenIn(msgspec.Struct, frozen=True, kw_only=True):
    """`replaced`: an older file of the same student is there. `decided`: of these older files, those with decisions of
    a person, which stay with the older file. `older`: files that do not count, since a newer one is there. `unsure`:
    students of whom the last file counts, although no name tells which is the newest. `unreadable`: students with a
    file that no layer can read, and why. `beside`: files beside a student's notebook. `unknown`: names of files that
    are no notebooks and name no student."""

    files: int
    new: int
    replaced: int
    decided: int = 0
    older: int = 0
    unsure: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    beside: int = 0
    unknown: tuple[str, ...] = ()

    def told(self) -> str:
        words = [f"{self.files} files, {self.new} of them new, {self.replaced} replace older ones"]
        if self.decided:
            words.append(f"{self.decided} of the older ones have decisions of yours: look at the new files yourself")
        if self.older:
            words.append(f"kept and not graded, since a newer one is here: {self.older} (with --replace they count)")
        if self.unsure:
            words.append(
                f"the names do not tell which of several files is the newest, so the last one counts and the others"
                f" are kept: {_few(self.unsure)}; to choose another, give it with --replace"
            )
        return "; ".join([*words, *self._not_read()])

    def _not_read(self) -> Iterator[str]:
        if self.unreadable:
            yield f"not readable, so a flag and no points: {_few(self.unreadable)}"
        if self.beside:
            yield f"left out, since they are no notebooks and their students have another file: {self.beside}"
        if self.unknown:
            yield f"left out, since they are no notebooks and name no student: {_few(self.unknown)}"


def _few(names: tuple[str, ...]) -> str:
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def take_in(database: Database, assignment: Assignment, incoming: Iterable[Incoming], replace: bool = False) -> TakenIn:
    """`replace`: these files count, also where they are older or seem so."""
    found = sorted(incoming, key=lambda one: one.owner.order)
    files = _submitted(database, assignment, found)
    _refuse_clashes(files)
    before = {one.id: one.pseudonym for one in submissions(database, assignment.id)}
    older, unsure, unreadable = 0, set(), []
    for one in files:
        place = _placed(one, known_files(database, assignment.id, one.owner.identity.key))
        counts = replace or place.counts
        who = _add(database, assignment, one, counts)
        older += not counts
        if counts and place.unsure and not replace:
            unsure.add(who)
        if one.problem:
            unreadable.append(f"{who} ({one.problem})")
    now = {one.id: one.pseudonym for one in submissions(database, assignment.id)}
    new = [now[found] for found in now if found not in before]
    replaced = set(new) & set(before.values())
    decided = sum(bool(history(database, each)) for each, pseudonym in before.items() if pseudonym in replaced)
    unknown = tuple(one.file_name for one in found if one.stray and one.owner.plain)
    return TakenIn(
        files=len(files),
        new=len(new),
        replaced=len(replaced),
        decided=decided,
        older=older,
        unsure=tuple(sorted(unsure)),
        unreadable=tuple(unreadable),
        beside=len(found) - len(files) - len(unknown),
        unknown=unknown,
    )


def _submitted(database: Database, assignment: Assignment, found: list[Incoming]) -> list[Incoming]:
    """A file that is no notebook stands for its student only where nothing better does."""
    better = {one.owner.identity.key for one in found if not one.stray}
    return [one for one in found if not one.stray or _stands(database, assignment, one, better)]


def _stands(database: Database, assignment: Assignment, one: Incoming, better: set[str]) -> bool:
    key = one.owner.identity.key
    if one.owner.plain or key in better:
        return False
    known = known_files(database, assignment.id, key)
    return not known or hashlib.sha256(one.content).hexdigest() in {file.blob_sha for file in known}


class _Place(msgspec.Struct, frozen=True):
    counts: bool
    unsure: bool = False


def _placed(one: Incoming, known: list[KnownFile]) -> _Place:
    """By what the names tell. Else a file that was here before stays where it is, and a new one is the newest."""
    now = next((file for file in known if file.counts), None)
    if now is None:
        return _Place(counts=True)
    its, ours = one.owner.order, owner_of(now.name, {}).order
    if its and ours and its != ours:
        return _Place(counts=its > ours)
    sha = hashlib.sha256(one.content).hexdigest()
    if sha in {file.blob_sha for file in known}:
        return _Place(counts=sha == now.blob_sha)
    return _Place(counts=True, unsure=True)


def _add(database: Database, assignment: Assignment, one: Incoming, counts: bool) -> str:
    who, late_days = one.owner.identity, one.owner.late_days
    stored = add_submission(
        database, assignment.id, who, one.file_name, one.content, late_days=late_days, counts=counts
    )
    return stored.pseudonym


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
