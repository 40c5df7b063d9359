"""`review`: one submission or one item on the terminal, and what the instructor decides."""

import json
from datetime import datetime
from pathlib import Path

import msgspec
from rich.console import Console

from grader.cli.options import me, open_book
from grader.cli.show import console, grade_table, table
from grader.errors import GraderError
from grader.grading import Grade, approve_all, approve_grade, for_graders, grade_of, grades, override
from grader.points import plain
from grader.store import (
    Assignment,
    Database,
    answers,
    find_submission,
    history,
    keep_comment,
    reopen,
    reveal,
    set_comment,
    undo,
)

_MACHINE = "machine"


class ReviewRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the command."""

    book: Path
    name: str
    student: str
    item: str
    points: str
    why: str
    comment: str | None
    keep: bool
    approve: bool
    approve_all: bool
    reopen: bool
    undo: bool
    history: bool
    prompts: bool
    reveal: bool
    who: str


def run_review(request: ReviewRequest) -> None:
    database, assignment = open_book(request.book, request.name)
    out = console()
    if request.approve_all:
        done = approve_all(database, grades(database, assignment), me(request.who))
        out.print(f"{done.approved} approved; {done.left_open} have open items or flags: look at each of them")
        return
    if not request.student:
        _show_item(out, grades(database, assignment), request.item)
        return
    grade = _grade(database, assignment, request.student)
    if _decide(database, assignment, grade, request, out):
        grade = _grade(database, assignment, request.student)
    _show(out, database, grade, request)


def _grade(database: Database, assignment: Assignment, student: str) -> Grade:
    found = grade_of(database, find_submission(database, assignment.id, student))
    if found is None:
        raise GraderError(f"{student} is not graded yet: disagg-grade grade --book {database.path.parent}")
    return found


def _decide(database: Database, assignment: Assignment, grade: Grade, request: ReviewRequest, out: Console) -> bool:
    """Whether something changed."""
    who, submission = me(request.who), grade.submission.id
    if request.points:
        points = None if request.points == _MACHINE else request.points
        override(database, grade, request.item, points, who, request.why)
    if request.comment is not None:
        set_comment(database, submission, request.item, request.comment, who)
        if request.keep:
            keep_comment(database, assignment.id, request.item, request.comment, who)
    if request.undo:
        taken = undo(database, submission, who)
        out.print(f"taken back: {taken.action} {taken.item}".rstrip())
    if request.reopen:
        reopen(database, submission, who, request.why)
    if request.approve:
        approve_grade(database, _grade(database, assignment, grade.submission.pseudonym), who)
    return bool(request.points or request.comment is not None or request.undo or request.reopen or request.approve)


def _show_item(out: Console, found: list[Grade], item: str) -> None:
    """All answers to one item; without an item, the list of submissions."""
    if not item:
        out.print(grade_table(found))
        out.print("one of them: disagg-grade review PSEUDONYM; one question: disagg-grade review --item ID")
        return
    known = [one.id for one in found[0].rubric.items] if found else []
    if item not in known:
        raise GraderError(f"the rubric has no item {item}; it has {', '.join(known)}")
    asked = found[0].rubric.item(item)
    out.print(f"{asked.title} ({plain(asked.points)} points)")
    for line in for_graders(asked):
        out.print(f"  {line}")
    made = table("student", "points", "status", "reason", "evidence")
    for grade in found:
        verdict = next((one for one in grade.verdicts if one.item_id == item), None)
        if verdict is None:  # graded by a rubric without the item
            continue
        quotes = "\n".join(one.quote for one in verdict.evidence if one.quote)[:300]
        made.add_row(grade.submission.pseudonym, plain(verdict.points), _words(verdict.status), verdict.reason, quotes)
    out.print(made)


def _words(status: str) -> str:
    return status.replace("_", " ")


def _show(out: Console, database: Database, grade: Grade, request: ReviewRequest) -> None:
    score = grade.score
    name = f" ({_revealed(database, grade, request)})" if request.reveal else ""
    out.print(f"{grade.submission.pseudonym}{name}: {plain(score.total)} of {plain(score.maximum)}, {grade.state}")
    if score.total != grade.machine.total:
        out.print(f"the machine gave {plain(grade.machine.total)}")
    _show_lines(out, grade)
    for line in dict.fromkeys(f"flag {flag.code}: {flag.message}" for flag in grade.flags):
        out.print(line)
    _show_feedback(out, grade)
    if request.history:
        _show_history(out, database, grade)
    if request.prompts:
        _show_prompts(out, database, grade)


def _revealed(database: Database, grade: Grade, request: ReviewRequest) -> str:
    who = reveal(database, [grade.submission.id], me(request.who), request.why)[grade.submission.id]
    return ", ".join(part for part in (who.name, who.key, who.email) if part)


def _show_lines(out: Console, grade: Grade) -> None:
    made = table("item", "points", "of", "layer", "status", "reason")
    for one in grade.score.components:
        status = _words(one.status) if one.status else one.kind
        limit = plain(one.max_points) if one.max_points else ""
        made.add_row(one.id, plain(one.points), limit, one.layer or "", status, _with_quotes(one.reason, one.evidence))
    out.print(made)


def _with_quotes(reason: str, evidence: tuple[msgspec.Struct, ...]) -> str:
    quotes = [f"  > {getattr(one, 'quote', '')}"[:200] for one in evidence if getattr(one, "quote", "")]
    return "\n".join([reason, *quotes[:3]])


def _show_feedback(out: Console, grade: Grade) -> None:
    if grade.feedback is None:
        return
    out.print("feedback (a draft until you approve):")
    for strength in grade.feedback.strengths:
        out.print(f"  + {strength.text}")
    for better in grade.feedback.improvements:
        out.print(f"  - {better.what}: {better.why} {better.how} {better.example}")
    out.print(f"  reflection: {grade.feedback.reflection.quality}. {grade.feedback.reflection.comment}")
    out.print(f"  for you: {grade.feedback.instructor_comment}")


def _show_history(out: Console, database: Database, grade: Grade) -> None:
    for change in history(database, grade.submission.id):
        when = datetime.fromtimestamp(change.at).strftime("%Y-%m-%d %H:%M")
        undone = " (taken back)" if change.undone else ""
        why = f": {change.why}" if change.why else ""
        what = f"{change.action} {change.item}".strip()
        out.print(f"{when} {change.who} {what}: {change.before} -> {change.after}{why}{undone}")


def _show_prompts(out: Console, database: Database, grade: Grade) -> None:
    for one in answers(database, grade.submission.id, grade.submission.current_key or ""):
        out.print(f"--- {one.layer} model {one.model}, reading {one.reading + 1}")
        for message in json.loads(one.prompt)["messages"]:
            out.print(f"[{message['role']}]\n{message['content']}")
        out.print(f"[answer]\n{one.answer or one.error}")
        out.print(f"[figures] {one.figures}")
