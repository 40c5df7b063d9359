"""`regrade`: a changed rubric, and what it changed."""

import json
from decimal import Decimal
from pathlib import Path

import msgspec
from rich.console import Console

from grader.cli.grade import run_and_report, watching
from grader.cli.options import open_book
from grader.cli.show import console, table
from grader.grading import GradeChange, GradeSettings, changes_since, parse_rubric
from grader.models import ModelSettings
from grader.points import plain
from grader.rubric import changed_items, dump_rubric, load_rubric
from grader.store import last_settings, save_rubric
from grader.texts import read_text
from grader.worker import WorkerOptions, queue_all, run_batch


def run_regrade(
    book: Path, name: str, rubric: Path | None, diff: bool, models: ModelSettings | bool | None, as_json: bool
) -> None:
    database, assignment = open_book(book, name)
    out = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
    if rubric:
        old = parse_rubric(assignment.rubric.content)
        new = load_rubric(read_text(rubric), str(rubric))
        touched = sorted(changed_items(old, new))
        assignment = save_rubric(database, assignment.name, dump_rubric(new))
        gone = sorted({item.id for item in old.items} - {item.id for item in new.items})
        words = [f"touches {', '.join(touched)}" if touched else "touches no item"]
        words += [f"without {', '.join(gone)}"] if gone else []
        out.print(f"rubric version {assignment.rubric.number}: {'; '.join(words)}")
    queue_all(database, assignment, _settings(last_settings(database, assignment.id), models))
    if not diff:
        run_and_report(database, assignment, WorkerOptions(), out, as_json)
        return
    with watching(out) as look:
        run_batch(database, assignment, WorkerOptions(), look)
    _show_changes(changes_since(database, assignment), as_json)


def _settings(last: str | None, models: ModelSettings | bool | None) -> GradeSettings:
    """As the last batch, unless other models are given. False: none."""
    before = msgspec.json.decode(last, type=GradeSettings) if last else GradeSettings()
    if models is None:
        return before
    return msgspec.structs.replace(before, models=models or None)


def _show_changes(changes: list[GradeChange], as_json: bool) -> None:
    if as_json:
        print(json.dumps([_as_data(one) for one in changes]))
        return
    out = console()
    if not changes:
        out.print("no grade changed")
        return
    made = table("student", "before", "after", "items")
    for one in changes:
        lines = [f"{item.item_id}: {_was(item.before)} -> {_was(item.after)}, {item.reason}" for item in one.items]
        lines += ["your approval was of the grade before: look again"] if one.unapproved else []
        made.add_row(one.pseudonym, plain(one.before), plain(one.after), "\n".join(lines))
    out.print(made)


def _was(points: Decimal | None) -> str:
    return "-" if points is None else plain(points)


def _as_data(change: GradeChange) -> dict[str, object]:
    items = {one.item_id: [_was(one.before), _was(one.after), one.reason] for one in change.items}
    return {
        "student": change.pseudonym,
        "before": plain(change.before),
        "after": plain(change.after),
        "items": items,
        "unapproved": change.unapproved,
    }
