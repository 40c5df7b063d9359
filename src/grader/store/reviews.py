"""What people decide. Every decision is a row that stays; the state is what the rows that were not undone say."""

import json
import time
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

import msgspec

from grader.store.database import Database, GradeBookError

Action = Literal["points", "comment", "approve", "reopen", "undo"]


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """`before` and `after` as JSON values. `undone`: a later row took it back."""

    id: int
    item: str
    action: Action
    before: Any
    after: Any
    who: str
    why: str
    at: float
    undone: bool = False


class HumanPoints(msgspec.Struct, frozen=True):
    points: Decimal
    who: str
    why: str
    at: float


class Approval(msgspec.Struct, frozen=True):
    """Of this total and this content: a hash of what was approved. Other content needs another approval."""

    who: str
    at: float
    total: Decimal
    content: str


class Review(msgspec.Struct, frozen=True):
    """The decisions that count now."""

    points: dict[str, HumanPoints] = {}
    comments: dict[str, str] = {}  # by item; empty: of the whole submission
    approval: Approval | None = None


def history(database: Database, submission_id: int) -> list[Change]:
    """Oldest first."""
    rows = database.rows("SELECT * FROM changes WHERE submission_id = ? ORDER BY id", (submission_id,))
    undone = {row["undoes"] for row in rows if row["undoes"]}
    return [
        Change(
            id=row["id"],
            item=row["item"],
            action=row["action"],
            before=json.loads(row["before"]),
            after=json.loads(row["after"]),
            who=row["who"],
            why=row["why"],
            at=row["at"],
            undone=row["id"] in undone,
        )
        for row in rows
    ]


def review_of(database: Database, submission_id: int) -> Review:
    points: dict[str, HumanPoints] = {}
    comments: dict[str, str] = {}
    approval: Approval | None = None
    for change in history(database, submission_id):
        if change.undone or change.action == "undo":
            continue
        if change.action == "points":
            points.pop(change.item, None)
            if change.after is not None:
                points[change.item] = HumanPoints(Decimal(change.after), change.who, change.why, change.at)
        elif change.action == "comment":
            comments[change.item] = change.after
        else:
            approval = _approval(change) if change.action == "approve" else None
    return Review(points, {item: text for item, text in comments.items() if text}, approval)


def _approval(change: Change) -> Approval:
    total, _, content = change.after.partition(" ")
    return Approval(change.who, change.at, Decimal(total), content)


def set_points(database: Database, submission_id: int, item: str, points: str | None, who: str, why: str) -> None:
    """A human's points for one item. They win over every machine's, now and after a regrade. None: the machine's."""
    if not why.strip():
        raise GradeBookError("an override needs a reason: --why")
    _record(database, submission_id, "points", item, _decimal(points), who, why)


def _decimal(points: str | None) -> str | None:
    if points is None:
        return None
    try:
        value = Decimal(points)
    except InvalidOperation:
        raise GradeBookError(f"points must be a number, not {points[:40]!r}") from None
    if not value.is_finite():
        raise GradeBookError(f"points must be a number, not {points[:40]!r}")
    return str(value)


def set_comment(database: Database, submission_id: int, item: str, text: str, who: str) -> None:
    """For the student's report. Empty: none."""
    _record(database, submission_id, "comment", item, text, who, "")


def approve(database: Database, submission_id: int, total: Decimal, content: str, who: str) -> None:
    """`content`: a hash of all that is approved."""
    _record(database, submission_id, "approve", "", f"{total} {content}", who, "")


def reopen(database: Database, submission_id: int, who: str, why: str) -> None:
    """Takes the approval away."""
    _record(database, submission_id, "reopen", "", None, who, why)


def _record(
    database: Database, submission_id: int, action: Action, item: str, after: object, who: str, why: str
) -> None:
    """A decision that is there already is not written twice: of two equal clicks one counts."""
    with database.transaction() as connection:
        before = _before(review_of(database, submission_id), action, item)
        last = last_decision(database, submission_id)
        if last and (last.action, last.item, last.after, last.who, last.why) == (action, item, after, who, why):
            return
        connection.execute(
            "INSERT INTO changes (submission_id, item, action, before, after, who, why, at)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (submission_id, item, action, json.dumps(before), json.dumps(after), who, why, time.time()),
        )


def last_decision(database: Database, submission_id: int) -> Change | None:
    """That was not taken back."""
    left = [one for one in history(database, submission_id) if not one.undone and one.action != "undo"]
    return left[-1] if left else None


def _before(review: Review, action: Action, item: str) -> str | None:
    if action == "points":
        return str(review.points[item].points) if item in review.points else None
    if action == "comment":
        return review.comments.get(item)
    return f"{review.approval.total} {review.approval.content}" if review.approval else None


def undo(database: Database, submission_id: int, who: str, decision: int | None = None) -> Change:
    """Takes the last decision back that was not taken back yet. `decision`: the one that is meant."""
    with database.transaction() as connection:
        last = last_decision(database, submission_id)
        if last is None:
            raise GradeBookError("nothing to undo: this submission has no decision of a person")
        if decision not in (None, last.id):
            raise GradeBookError("nothing was undone: the decision is taken back already, or another came after it")
        connection.execute(
            "INSERT INTO changes (submission_id, item, action, before, after, who, why, at, undoes)"
            " VALUES (?, ?, 'undo', ?, ?, ?, '', ?, ?)",
            (submission_id, last.item, json.dumps(last.after), json.dumps(last.before), who, time.time(), last.id),
        )
    return last


def keep_comment(database: Database, assignment_id: int, item: str, text: str, who: str) -> None:
    """In the comment bank."""
    with database.transaction() as connection:
        connection.execute(
            "INSERT OR IGNORE INTO comments (assignment_id, item, text, who, at) VALUES (?, ?, ?, ?, ?)",
            (assignment_id, item, text, who, time.time()),
        )


def comment_bank(database: Database, assignment_id: int, item: str | None = None) -> list[tuple[str, str]]:
    """Item and text."""
    rows = database.rows("SELECT item, text FROM comments WHERE assignment_id = ? ORDER BY id", (assignment_id,))
    return [(row["item"], row["text"]) for row in rows if item is None or row["item"] == item]
