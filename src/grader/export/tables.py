"""Tables for spreadsheets and learning platforms."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal

from grader.grading import Grade
from grader.points import plain
from grader.store import StudentIdentity

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")

CellValue = str | Decimal | int | float | None


def as_csv(rows: Iterable[Sequence[CellValue]]) -> str:
    """Texts that a spreadsheet would take for a formula get an apostrophe before them. Numbers stay numbers."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\r\n")
    writer.writerows([guarded(cell) for cell in row] for row in rows)
    return buffer.getvalue()


def guarded(cell: CellValue) -> str:
    if cell is None:
        return ""
    if not isinstance(cell, str):
        return plain(cell) if isinstance(cell, Decimal) else str(cell)
    if cell == "-":  # nothing, as Moodle writes it
        return cell
    return "'" + cell if cell.lstrip(" ").startswith(_FORMULA) else cell


Identities = Mapping[int, StudentIdentity]  # by submission; empty: pseudonyms only


def item_table(grades: Sequence[Grade], identities: Identities) -> list[list[CellValue]]:
    """A row for each student, a column for each item of the rubric, then what changed the sum. An open item is empty:
    a number would look like a grade."""
    if not grades:
        return [["pseudonym", "total"]]
    items = [item.id for item in grades[0].rubric.items]
    named = ["name", "key", "lms_id", "email"] if identities else []
    before = ["pseudonym", *named, "total", "maximum", "percent", "letter", "state"]
    after = ["caps_and_late", "open_points", "flags", "comment"]
    head = [*before, *(f"item {one}" if one in (*before, *after) else one for one in items), *after]
    return [[*head], *(_item_row(grade, items, identities) for grade in grades)]


def _item_row(grade: Grade, items: list[str], identities: Identities) -> list[CellValue]:
    score = grade.score
    of_item = {one.id: one for one in score.components if one.kind in ("item", "deduction", "override")}
    rest = sum((one.points for one in score.components if one.id not in of_item), Decimal(0))
    points = {name: None if one.status == "needs_review" else one.points for name, one in of_item.items()}
    who = identities.get(grade.submission.id)
    named: list[CellValue] = [who.name, who.key, who.lms_id, who.email] if who else []
    row: list[CellValue] = [grade.submission.pseudonym, *named, score.total, score.maximum, score.percent]
    row += [
        "" if score.needs_review else score.letter,
        grade.state,
        *(points.get(item) for item in items),
        rest,
        score.pending,
    ]
    return [*row, "; ".join(sorted({flag.code for flag in grade.flags})), grade.review.comments.get("", "")]


def final_total(grade: Grade) -> Decimal | None:
    """For a learning platform, which has no word for open items: a sum without them would look like a grade."""
    return None if grade.score.needs_review else grade.score.total


def canvas_table(grades: Sequence[Grade], identities: Identities, column: str) -> list[list[CellValue]]:
    """As Canvas imports a gradebook: students, then one assignment. The second row has the points possible."""
    maximum = grades[0].score.maximum if grades else None
    head: list[CellValue] = ["Student", "ID", "SIS User ID", "SIS Login ID", "Section", column]
    rows = [_canvas_row(identities[grade.submission.id], grade) for grade in grades]
    return [head, ["    Points Possible", None, None, None, None, maximum], *rows]


def _canvas_row(who: StudentIdentity, grade: Grade) -> list[CellValue]:
    login = who.email or ("" if who.lms_id else who.key)
    return [who.name or who.key, who.lms_id, None, login, None, final_total(grade)]


def moodle_table(grades: Sequence[Grade], identities: Identities) -> list[list[CellValue]]:
    """As Moodle's grading worksheet of an assignment."""
    head: list[CellValue] = ["Identifier", "Full name", "Email address", "Status", "Grade", "Maximum Grade"]
    head += ["Grade can be changed", "Last modified (submission)", "Last modified (grade)", "Feedback comments"]
    return [head, *(_moodle_row(identities[grade.submission.id], grade) for grade in grades)]


def _moodle_row(who: StudentIdentity, grade: Grade) -> list[CellValue]:
    identifier = f"Participant {who.lms_id}" if who.lms_id else who.key
    status, comment = "Submitted for grading", grade.review.comments.get("", "")
    total, maximum = final_total(grade), grade.score.maximum
    return [identifier, who.name, who.email, status, total, maximum, "Yes", "-", "-", comment]
