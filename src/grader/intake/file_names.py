"""Who handed a file in: from the names that learning platforms give to downloaded files, or from a roster."""

import csv
import io
import re
from pathlib import PurePosixPath

import msgspec

from grader.errors import GraderError
from grader.platforms import read_platform_table
from grader.store import StudentIdentity

# Canvas: doejane_LATE_12345_67890_homework.ipynb. The first number is the student's, the second the file's.
_CANVAS = re.compile(r"(?P<key>[^\W_]+)_(?P<late>LATE_)?(?P<id>\d+)_(?P<file>\d+)_.+", re.IGNORECASE)
# Moodle: Jane Doe_12345_assignsubmission_file_/homework.ipynb, or in the file's name itself.
_MOODLE = re.compile(r"(?P<name>[^_/]+)_(?P<id>\d+)_assignsubmission_file_?.*")
# Blackboard: Homework 1_doejane_attempt_2026-03-01-12-30-05_homework.ipynb.
_BLACKBOARD = re.compile(r".+_(?P<key>[^_/]+)_attempt_(?P<time>\d{4}(?:-\d\d){5})_.+")
_LEAST_LATE_DAYS = 1.0  # Canvas says that a file is late, and not by how much


class RosterInvalid(GraderError):
    """The roster cannot be read."""


class Owner(msgspec.Struct, frozen=True):
    """`order`: of several files of one student the highest is the newest; 0: the name does not tell. `plain`: the name
    is no platform's."""

    identity: StudentIdentity
    late_days: float = 0.0
    order: int = 0
    plain: bool = False
    late_is_known: bool = False  # of a roster's row: it says how late the work is


Roster = dict[str, Owner]  # by key, in lower case


def owner_of(path: str, roster: Roster) -> Owner:
    """`path`: with slashes, as in a ZIP. A roster knows better than a name."""
    found = _parsed(PurePosixPath(path))
    who = found.identity
    known = roster.get(who.lms_id) or roster.get(who.key.lower()) or roster.get(who.name.lower())
    if known is None:
        return found
    late_days = known.late_days if known.late_is_known else found.late_days
    return msgspec.structs.replace(known, late_days=late_days, order=found.order, plain=found.plain)


def _parsed(path: PurePosixPath) -> Owner:
    for part in (path.name, *reversed(path.parent.parts)):
        if moodle := _MOODLE.fullmatch(part):
            return Owner(StudentIdentity(key=moodle["id"], name=moodle["name"].strip(), lms_id=moodle["id"]))
    if canvas := _CANVAS.fullmatch(path.name):
        late = _LEAST_LATE_DAYS if canvas["late"] else 0.0
        identity = StudentIdentity(key=canvas["id"], name=canvas["key"], lms_id=canvas["id"])  # two may have one name
        return Owner(identity, late, int(canvas["file"]))
    if blackboard := _BLACKBOARD.fullmatch(path.name):
        return Owner(StudentIdentity(key=blackboard["key"]), order=int(blackboard["time"].replace("-", "")))
    if student := _nbgrader_student(path):
        return Owner(StudentIdentity(key=student))
    return Owner(StudentIdentity(key=path.with_suffix("").as_posix()), plain=True)


def _nbgrader_student(path: PurePosixPath) -> str:
    """submitted/STUDENT/ASSIGNMENT/notebook.ipynb"""
    parts = path.parts
    return parts[parts.index("submitted") + 1] if "submitted" in parts[:-3] else ""


def read_roster(text: str) -> Roster:
    """A gradebook of Canvas, a grading worksheet of Moodle, or a CSV with a column `key` (as in file names), and if
    known `name`, `email`, `lms_id` and `late_days`."""
    if table := read_platform_table(text):
        return _roster([Owner(who) for row in table.rows if (who := table.student(row))])
    reader = csv.DictReader(io.StringIO(text.removeprefix("\ufeff")))
    if "key" not in (reader.fieldnames or ()):
        raise RosterInvalid(
            "the roster needs a column `key`, and may have name, email, lms_id and late_days; or give a gradebook of"
            " Canvas or a grading worksheet of Moodle"
        )
    return _roster([_row_owner(row, reader.line_num) for row in reader])


def _row_owner(row: dict[str, str], line: int) -> Owner:
    told = row.get("late_days") or ""
    identity = StudentIdentity(
        key=row["key"], name=row.get("name") or "", email=row.get("email") or "", lms_id=row.get("lms_id") or ""
    )
    return Owner(identity, _days(told or "0", line), late_is_known=bool(told))


def _roster(owners: list[Owner]) -> Roster:
    by_key = {owner.identity.key.lower(): owner for owner in owners if owner.identity.key}
    return by_key | {owner.identity.lms_id: owner for owner in owners if owner.identity.lms_id}


def _days(text: str, line: int) -> float:
    try:
        return max(0.0, float(text))
    except ValueError:
        raise RosterInvalid(f"line {line} of the roster: late_days must be a number, not {text[:20]!r}") from None
