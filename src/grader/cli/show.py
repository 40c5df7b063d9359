"""Tables on the terminal."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from grader.cli.options import open_book
from grader.grading import Grade, figures_line, grades, model_figures, resemblances
from grader.points import plain
from grader.store import BatchProgress, progress, submissions


def console() -> Console:
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True)


def table(*heads: str) -> Table:
    made = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        made.add_column(head, justify="right" if head in _NUMBERS else "left", overflow="fold")
    return made


_NUMBERS = {
    "points",
    "open",
    "count",
    "exact",
    "within 1",
    "kappa",
    "ICC",
    "bias",
    "leniency",
    "MAE",
    "before",
    "after",
}


def show_status(book: Path, name: str, flagged: bool, alike: bool, as_json: bool) -> None:
    database, assignment = open_book(book, name)
    state, found = progress(database, assignment.id), grades(database, assignment)
    shown = [one for one in found if not flagged or one.flags or one.score.needs_review]
    if as_json:
        print(json.dumps({"assignment": assignment.name, "grades": [as_data(one) for one in shown]}))
        return
    out = console()
    out.print(f"{assignment.name}, rubric version {assignment.rubric.number}: {batch_line(state)}")
    out.print(grade_table(shown))
    if read := [one.models for one in found if one.models]:
        out.print(figures_line(model_figures(read)))
    for pair in resemblances(database, assignment, submissions(database, assignment.id)) if alike else ():
        share = "the same file" if pair.identical else f"{pair.share:.0%} of the code"
        out.print(f"alike: {pair.first} and {pair.second}, {share}")
    for pseudonym, error in state.failures:
        out.print(f"{pseudonym} failed: {error}")


def batch_line(state: BatchProgress) -> str:
    """Both stages in one line."""
    parts = [f"checked {state.checks.done} of {state.checks.total}"]
    if state.models.total:
        parts.append(f"read by the models {state.models.done} of {state.models.total}")
    if state.waiting_reason:
        parts.append(f"waiting for the models: {state.waiting_reason}")
    return ", ".join(parts)


def grade_table(found: list[Grade]) -> Table:
    made = table("student", "points", "of", "open", "letter", "state", "flags")
    for grade in found:
        score = grade.score
        codes = ", ".join(sorted({flag.code for flag in grade.flags}))
        made.add_row(
            grade.submission.pseudonym,
            plain(score.total),
            plain(score.maximum),
            plain(score.pending) if score.pending else "",
            "" if score.needs_review else score.letter,
            grade.state,
            codes,
        )
    return made


def as_data(grade: Grade) -> dict[str, Any]:
    score = grade.score
    return {
        "student": grade.submission.pseudonym,
        "total": plain(score.total),
        "maximum": plain(score.maximum),
        "pending": plain(score.pending),
        "letter": None if score.needs_review else score.letter,
        "state": grade.state,
        "items": {one.item_id: None if one.status == "needs_review" else plain(one.points) for one in grade.verdicts},
        "open_items": [one.item_id for one in grade.verdicts if one.status == "needs_review"],
        "flags": [{"code": flag.code, "message": flag.message} for flag in grade.flags],
    }
