"""Pilot mode: a human grades some submissions by hand; the machine's points of the same ones are compared."""

import csv
import io
from collections.abc import Sequence

import msgspec

from grader.agreement.measures import Agreement, Pair, agreement
from grader.errors import GraderError
from grader.grading import Grade

_BANDS = ((0, 60, "under 60 %"), (60, 85, "60 to 85 %"), (85, 101, "85 % and more"))
FEWEST = 5  # submissions that a human should grade before anything is released


class HandGradesInvalid(GraderError):
    """The table of a human's points cannot be read."""


class PilotReport(msgspec.Struct, frozen=True, kw_only=True):
    """`open_items`: pairs in which the machine has no number yet; they are in no figure."""

    submissions: int
    totals: Agreement
    items: dict[str, Agreement]
    bands: dict[str, Agreement]  # of items, by the quality of the whole work as the human sees it
    open_items: int


HandGrades = dict[str, dict[str, float]]  # points by pseudonym and item


def read_hand_grades(text: str) -> HandGrades:
    """CSV with a column `pseudonym` and a column for each item, as `export` writes it. Empty cells are not graded."""
    reader = csv.DictReader(io.StringIO(text.removeprefix("\ufeff")))
    if "pseudonym" not in (reader.fieldnames or ()):
        raise HandGradesInvalid("the table needs a column `pseudonym`: `disagg-grade export` writes one")
    return {row["pseudonym"]: _numbers(row) for row in reader}


def _numbers(row: dict[str, str]) -> dict[str, float]:
    found = {}
    for name, value in row.items():
        if value and name and name != "pseudonym":
            try:
                found[name] = float(value)
            except ValueError:
                continue  # a column of the export that is no item
    return found


def given_by_hand(grades: Sequence[Grade]) -> HandGrades:
    """Points that people set in the grade book."""
    found = {
        grade.submission.pseudonym: {item: float(given.points) for item, given in grade.review.points.items()}
        for grade in grades
    }
    return {pseudonym: points for pseudonym, points in found.items() if points}


def pilot_report(grades: Sequence[Grade], by_hand: HandGrades) -> PilotReport:
    graded = [grade for grade in grades if grade.submission.pseudonym in by_hand]
    items: dict[str, list[Pair]] = {}
    bands: dict[str, list[Pair]] = {name: [] for _, _, name in _BANDS}
    open_items = 0
    for grade in graded:
        human = by_hand[grade.submission.pseudonym]
        for verdict in grade.machine_verdicts:
            if verdict.item_id not in human:
                continue
            if verdict.status == "needs_review":
                open_items += 1
                continue
            both = human[verdict.item_id], float(verdict.points)
            items.setdefault(verdict.item_id, []).append(both)
            bands[_band(grade, human)].append(both)
    return PilotReport(
        submissions=len(graded),
        totals=agreement([pair for grade in graded if (pair := _totals(grade, by_hand))]),
        items={name: agreement(pairs) for name, pairs in items.items()},
        bands={name: agreement(pairs) for name, pairs in bands.items()},
        open_items=open_items,
    )


def _totals(grade: Grade, by_hand: HandGrades) -> Pair | None:
    """The sums of the items that both decided."""
    human = by_hand[grade.submission.pseudonym]
    both = [one for one in grade.machine_verdicts if one.item_id in human and one.status != "needs_review"]
    return (sum(human[one.item_id] for one in both), float(sum(one.points for one in both))) if both else None


def _band(grade: Grade, human: dict[str, float]) -> str:
    """A table of `export` also has columns that are no items: total, maximum, percent."""
    items = [item for item in grade.rubric.items if item.id in human]
    possible = sum(float(item.points) for item in items if not item.deduction)
    percent = 100 * sum(human[item.id] for item in items) / possible if possible else 0.0
    return next(
        (name for low, high, name in _BANDS if low <= percent < high), _BANDS[0][2] if percent < 0 else _BANDS[-1][2]
    )
