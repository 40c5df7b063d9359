"""Tables of learning platforms: which platform a CSV is of, and what its rows say of a student.

Canvas: the gradebook. Its columns are Student (as "Last, First"), ID, SIS User ID, SIS Login ID, Section, and "Name
(number)" for each assignment; rows before the first student have no ID. Moodle: the grading worksheet of an assignment,
with Identifier (as "Participant 123"), Full name, Email address, Grade, Maximum Grade, Feedback comments and others."""

import csv
import io
import re
from typing import Literal

import msgspec

from grader.errors import GraderError
from grader.store import StudentIdentity

Platform = Literal["canvas", "moodle"]
_PARTICIPANT = re.compile(r"\D*(\d+)\s*")
_NEEDED: dict[Platform, set[str]] = {"canvas": {"Student", "ID"}, "moodle": {"Identifier", "Grade"}}


class PlatformTable(msgspec.Struct, frozen=True):
    """A CSV as the platform wrote it. `rows` has every row but the head."""

    platform: Platform
    head: list[str]
    rows: list[list[str]]
    delimiter: str

    def value(self, row: list[str], column: str) -> str:
        place = self.head.index(column) if column in self.head else len(row)
        return row[place].strip() if place < len(row) else ""

    def student(self, row: list[str]) -> StudentIdentity | None:
        """None: the row is of no student."""
        return _CANVAS_OR_MOODLE[self.platform](self, row)

    def text(self) -> str:
        buffer = io.StringIO()
        csv.writer(buffer, delimiter=self.delimiter, lineterminator="\r\n").writerows([self.head, *self.rows])
        return buffer.getvalue()


def read_platform_table(text: str) -> PlatformTable | None:
    """None: it is a table of no platform that we know."""
    text = text.removeprefix("\ufeff")
    first = text.split("\n", 1)[0]
    delimiter = max(",;\t", key=first.count)
    try:
        found = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter))
    except csv.Error as error:
        raise GraderError(f"this is no CSV: {error}") from None
    head = [cell.strip() for cell in found[0]] if found else []
    for platform, needed in _NEEDED.items():
        if needed <= set(head):
            return PlatformTable(platform, head, [row for row in found[1:] if row], delimiter)
    return None


def _of_canvas(table: PlatformTable, row: list[str]) -> StudentIdentity | None:
    name, lms_id = table.value(row, "Student"), table.value(row, "ID")
    if not lms_id:  # points possible, posting policy
        return None
    login = table.value(row, "SIS Login ID")
    return StudentIdentity(key=lms_id, name=name, lms_id=lms_id, email=login if "@" in login else "")


def _of_moodle(table: PlatformTable, row: list[str]) -> StudentIdentity | None:
    found = _PARTICIPANT.fullmatch(table.value(row, "Identifier"))
    if found is None:
        return None
    name, email = table.value(row, "Full name"), table.value(row, "Email address")
    return StudentIdentity(key=found[1], name=name, lms_id=found[1], email=email)


_CANVAS_OR_MOODLE = {"canvas": _of_canvas, "moodle": _of_moodle}
