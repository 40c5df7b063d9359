"""What a regrade changed, item by item."""

from decimal import Decimal

import msgspec

from grader.grading.final import Grade, grade_of, grade_with
from grader.store import Assignment, Database, gradings, submissions
from grader.verdicts import Verdict


class ItemChange(msgspec.Struct, frozen=True):
    item_id: str
    before: Decimal | None  # None: the item is new
    after: Decimal | None  # None: the item is gone
    reason: str


class GradeChange(msgspec.Struct, frozen=True, kw_only=True):
    pseudonym: str
    before: Decimal
    after: Decimal
    items: tuple[ItemChange, ...]
    unapproved: bool = False  # what was approved is not what is there now


def changes_since(database: Database, assignment: Assignment) -> list[GradeChange]:
    """Between each submission's newest grading and the one before it."""
    found = []
    for submission in submissions(database, assignment.id):
        now = grade_of(database, submission)
        earlier = [one for one in gradings(database, submission.id) if one.key != submission.current_key and one.checks]
        if now and earlier:
            found.append(_change(grade_with(database, submission, earlier[0]), now))
    return [change for change in found if change.items or change.before != change.after or change.unapproved]


def _change(before: Grade, after: Grade) -> GradeChange:
    old = {one.item_id: one for one in before.verdicts}
    new = {one.item_id: one for one in after.verdicts}
    items = [
        ItemChange(name, old[name].points if name in old else None, new[name].points if name in new else None, reason)
        for name in {**old, **new}
        if (reason := _reason(name, old, new))
    ]
    return GradeChange(
        pseudonym=after.submission.pseudonym,
        before=before.score.total,
        after=after.score.total,
        items=tuple(items),
        unapproved=before.approved and not after.approved,
    )


def _reason(name: str, old: dict[str, Verdict], new: dict[str, Verdict]) -> str:
    if name not in new:
        return "no longer in the rubric"
    if name not in old:
        return "new in the rubric"
    a, b = old[name], new[name]
    same = (a.points, a.status) == (b.points, b.status)
    return "" if same else b.reason
