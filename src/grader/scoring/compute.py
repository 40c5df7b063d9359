"""From verdicts to the score. Every rule that changes the sum is a line with a reason."""

import math
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction

import msgspec

from grader.points import plain, rounded
from grader.rubric import Cap, Letter, Rubric
from grader.scoring.score import Component, Score
from grader.verdicts import Verdict

ZERO = Decimal(0)


class Lateness(msgspec.Struct, frozen=True, kw_only=True):
    """How long after the deadline the work came."""

    minutes: int


def score(rubric: Rubric, verdicts: Sequence[Verdict], lateness: Lateness | None = None) -> Score:
    """The rubric's items, then deductions, caps, the floor at 0 and the late policy, in this order."""
    lines = [_line(rubric, verdict) for verdict in _in_order(rubric, verdicts)]
    for cap in rubric.caps:
        lines += _capped(cap, rubric, lines)
    lines += _floor(lines)
    if lateness is not None:
        lines += _late(rubric, lines, lateness)
    return _score(rubric, lines)


def _in_order(rubric: Rubric, verdicts: Sequence[Verdict]) -> list[Verdict]:
    by_id = {verdict.item_id: verdict for verdict in verdicts}
    assert len(by_id) == len(verdicts), "two verdicts for one item"
    missing = [item.id for item in rubric.items if item.id not in by_id]
    assert not missing, f"no verdict for {', '.join(missing)}"
    return [by_id[item.id] for item in rubric.items]


def _line(rubric: Rubric, verdict: Verdict) -> Component:
    item = rubric.item(verdict.item_id)
    return Component(
        id=item.id,
        title=item.title,
        kind="deduction" if item.deduction else "item",
        points=verdict.points,
        max_points=verdict.max_points,
        group=item.group,
        status=verdict.status,
        layer=verdict.layer,
        pending=verdict.pending,
        reason=verdict.reason,
        evidence=verdict.evidence,
    )


def _sum(lines: Sequence[Component]) -> Decimal:
    return sum((line.points for line in lines), ZERO)


def _capped(cap: Cap, rubric: Rubric, lines: Sequence[Component]) -> list[Component]:
    """A cap on all items counts what earlier caps took."""
    if cap.unless and _status(lines, cap.unless) == "earned":
        return []
    over = _sum([line for line in lines if not cap.items or line.id in cap.items]) - cap.at_most
    if over <= 0:
        return []
    reason = f"{cap.reason} (at most {plain(cap.at_most)} points)"
    return [Component(id=f"cap:{cap.id}", title=f"Cap: {cap.id}", kind="cap", points=-over, reason=reason)]


def _status(lines: Sequence[Component], item_id: str) -> str | None:
    return next((line.status for line in lines if line.id == item_id), None)


def _floor(lines: Sequence[Component]) -> list[Component]:
    below = -_sum(lines)
    if below <= 0:
        return []
    reason = "Deductions cannot make the total negative."
    return [Component(id="floor", title="Floor", kind="floor", points=below, reason=reason)]


def _late(rubric: Rubric, lines: Sequence[Component], lateness: Lateness) -> list[Component]:
    """Percent of the maximum per started day; never more than what is left."""
    policy = rubric.late
    if policy is None or lateness.minutes <= policy.grace_minutes:
        return []
    days = math.ceil(lateness.minutes / (24 * 60))
    refused = policy.refuse_after_days is not None and days > policy.refuse_after_days
    percent = Decimal(100) if refused else min(policy.per_day_percent * days, policy.max_percent)
    lost = min(rounded(Fraction(rubric.maximum) * Fraction(percent) / 100, rubric.point_step), _sum(lines))
    reason = (
        f"{days} days late: work is refused after {policy.refuse_after_days} days."
        if refused
        else f"{days} {'day' if days == 1 else 'days'} late: {plain(percent)} % of {plain(rubric.maximum)} points."
    )
    return [Component(id="late", title="Late", kind="late", points=-lost, reason=reason)]


def _score(rubric: Rubric, lines: Sequence[Component]) -> Score:
    total, maximum = _sum(lines), rubric.maximum
    percent = percent_of(total, maximum)
    return Score(
        components=tuple(lines),
        total=total,
        maximum=maximum,
        percent=percent,
        letter=letter_of(percent, rubric.letters),
        pending=sum((line.pending for line in lines), ZERO),
    )


def percent_of(total: Decimal, maximum: Decimal) -> Decimal:
    """To two digits. 0 of 0 points is 0 percent."""
    return rounded(Fraction(total) * 100 / Fraction(maximum)) if maximum else ZERO


def letter_of(percent: Decimal, letters: Sequence[Letter]) -> str:
    return next((letter.letter for letter in letters if percent >= letter.from_percent), letters[-1].letter)
