"""What an instructor does with a grade. Each function checks, then writes one row that stays."""

from decimal import Decimal
from fractions import Fraction

import msgspec

from grader.errors import GraderError
from grader.grading.final import Grade
from grader.points import plain, share_of
from grader.rubric import Item, Manual
from grader.store import Database, approve, set_points

_DIGITS = 6


class DecisionRefused(GraderError):
    """The decision does not fit the rubric or the state of the grade."""


def override(database: Database, grade: Grade, item_id: str, points: str | None, who: str, why: str) -> None:
    """None: back to the machine's points."""
    known = [item.id for item in grade.rubric.items]
    if not item_id:
        raise DecisionRefused(f"points belong to an item: name it with --item; the rubric has {', '.join(known)}")
    if item_id not in known:
        raise DecisionRefused(f"the rubric has no item {item_id}; it has {', '.join(known)}")
    if points is not None:
        _require_range(grade, item_id, points)
    set_points(database, grade.submission.id, item_id, points, who, why)


def _require_range(grade: Grade, item_id: str, points: str) -> None:
    item = grade.rubric.item(item_id)
    low, high = (-item.points, Decimal(0)) if item.deduction else (Decimal(0), item.points)
    try:
        value = Decimal(points)
    except ArithmeticError:
        value = Decimal("NaN")
    if not value.is_finite():
        raise DecisionRefused(f"points must be a number, not {points[:40]!r}")
    if -int(value.as_tuple().exponent) > _DIGITS:
        raise DecisionRefused(f"points have at most {_DIGITS} digits after the point")
    if not low <= value <= high:
        raise DecisionRefused(f"{item_id} takes {plain(low)} to {plain(high)} points, not {points}")


def for_graders(item: Item) -> list[str]:
    """What the rubric tells those who decide: the guideline, and levels with their points."""
    guideline = item.check.instructions if isinstance(item.check, Manual) else ""
    lines = [f"guideline: {text}" for text in (item.guideline, guideline) if text]
    levels = [f"{level.name}: {plain(share_of(item.points, Fraction(level.share)))} points" for level in item.levels]
    told = [f". {level.description}" if level.description else "" for level in item.levels]
    return lines + [f"{level}{words}" for level, words in zip(levels, told, strict=True)]


def approve_grade(database: Database, grade: Grade, who: str) -> None:
    """A grade with open items cannot be approved: their points would be a silent zero."""
    open_items = [one.item_id for one in grade.verdicts if one.status == "needs_review"]
    if open_items:
        raise DecisionRefused(
            f"{grade.submission.pseudonym} has open items: {', '.join(open_items)}; give them points first"
        )
    approve(database, grade.submission.id, grade.score.total, grade.content, who)


class Approved(msgspec.Struct, frozen=True):
    approved: int
    left_open: int


def approve_all(database: Database, grades: list[Grade], who: str) -> Approved:
    """All that have no open item and no flag. The others need a look of their own."""
    ready = [one for one in grades if not one.approved and not one.score.needs_review and not one.flags]
    for grade in ready:
        approve_grade(database, grade, who)
    left = [one for one in grades if not one.approved and one not in ready]
    return Approved(len(ready), len(left))
