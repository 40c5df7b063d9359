"""Grades go into the platform's own table: the file that Canvas or Moodle exported, with one column filled in."""

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

import msgspec

from grader.errors import GraderError
from grader.export.tables import Identities, guarded
from grader.grading import Grade
from grader.platforms import PlatformTable, read_platform_table
from grader.points import plain
from grader.store import StudentIdentity

_NUMBER = re.compile(r"\s*\(\d+\)$")  # Canvas: Homework 1 (12345)
_POINTS = "Points Possible"


class Filled(msgspec.Struct, frozen=True, kw_only=True):
    """`missing`: names of the graded who are not in the table. `platform`: canvas or moodle."""

    platform: str
    text: str
    filled: int
    missing: tuple[str, ...]


def fill_gradebook(text: str, grades: Sequence[Grade], identities: Identities, column: str) -> Filled:
    """All other columns, and rows of other students or of those with open items, stay as they are. `column`: the name
    of the assignment in Canvas; a new column is added where there is none. Raises GraderError where the table has
    another maximum."""
    table = read_platform_table(text)
    if table is None:
        raise GraderError("this is neither a gradebook of Canvas (CSV) nor a grading worksheet of Moodle")
    places = _places(table)
    rows = {grade.submission.id: _row_of(identities[grade.submission.id], places) for grade in grades}
    put = _put_canvas if table.platform == "canvas" else _put_moodle
    final = [one for one in grades if not one.score.needs_review]
    graded = [(row, one) for one in final if (row := rows[one.submission.id]) is not None]
    put(table, graded, column)
    who = [identities[one.submission.id] for one in grades if rows[one.submission.id] is None]
    return Filled(
        platform=table.platform,
        text=table.text(),
        filled=len(graded),
        missing=tuple(one.name or one.key for one in who),
    )


def _places(table: PlatformTable) -> dict[str, int]:
    """Rows by what names a student; what two students share names neither."""
    found: dict[str, int] = {}
    shared = set()
    for number, row in enumerate(table.rows):
        if who := table.student(row):
            for sign in set(_signs(who)):
                shared |= {sign} if sign in found else set()
                found[sign] = number
    return {sign: number for sign, number in found.items() if sign not in shared}


def _signs(who: StudentIdentity) -> list[str]:
    """Best first."""
    signs = [("id", who.lms_id), ("email", who.email), ("key", who.key), ("name", who.name)]
    return [f"{kind} {value.lower()}" for kind, value in signs if value]


def _row_of(who: StudentIdentity, places: dict[str, int]) -> int | None:
    return next((places[sign] for sign in _signs(who) if sign in places), None)


def _put_canvas(table: PlatformTable, graded: list[tuple[int, Grade]], column: str) -> None:
    place = next((n for n, head in enumerate(table.head) if _is_column(head, column)), None)
    if place is None:
        place = len(table.head)
        table.head.append(column)
    for row in table.rows:
        row += [""] * (len(table.head) - len(row))
        if table.value(row, "Student") == _POINTS and graded:
            maximum = graded[0][1].score.maximum
            _require_maximum(row[place], maximum)
            row[place] = row[place] or plain(maximum)
    for number, grade in graded:
        table.rows[number][place] = plain(grade.score.total)


def _is_column(head: str, column: str) -> bool:
    return column.lower() in (head.lower(), _NUMBER.sub("", head).lower())


def _put_moodle(table: PlatformTable, graded: list[tuple[int, Grade]], column: str) -> None:
    for number, grade in graded:
        row = table.rows[number]
        row += [""] * (len(table.head) - len(row))
        _require_maximum(table.value(row, "Maximum Grade"), grade.score.maximum)
        row[table.head.index("Grade")] = plain(grade.score.total)
        if (comment := grade.review.comments.get("", "")) and "Feedback comments" in table.head:
            row[table.head.index("Feedback comments")] = guarded(comment)


def _require_maximum(text: str, maximum: Decimal) -> None:
    try:
        told = Decimal(text.strip().replace(",", ".")) if text.strip() else maximum
    except InvalidOperation:
        return  # words such as (read only)
    if told and told != maximum:
        raise GraderError(
            f"the platform's table has {plain(told)} points, the rubric {plain(maximum)}: make them equal"
        )
