"""`grade`: files into the grade book, a worker process, and its progress."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bars

from disaggregated_inference.errors import DisaggError
from grader.cli.options import open_book
from grader.cli.show import as_data, batch_line, grade_table
from grader.errors import GraderError
from grader.grading import Grade, GradeSettings, grades, parse_rubric
from grader.intake import read_files, read_roster, take_in
from grader.models import ModelSettings, require_models
from grader.sandbox import require_sandbox
from grader.store import Assignment, BatchProgress, Database, finished_since
from grader.texts import read_text
from grader.timeouts import ProgramTimeouts
from grader.worker import Watched, WorkerOptions, queue_all, run_batch


def grade_files(
    book: Path,
    name: str,
    files: list[Path],
    models: ModelSettings | None,
    rerun: bool,
    roster: Path | None,
    jobs: int,
    patience_s: float,
    as_json: bool,
    replace: bool,
) -> None:
    database, assignment = open_book(book, name)
    out = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
    if rerun or parse_rubric(assignment.rubric.content).rerun:
        require_sandbox()
    if models:
        check_models(models)
    known = read_roster(read_text(roster)) if roster else {}
    taken = take_in(database, assignment, read_files(files, known), replace)
    if files:
        out.print(taken.told())
    queue_all(database, assignment, GradeSettings(models=models, rerun=rerun))
    options = WorkerOptions(model_threads=jobs, patience_s=patience_s)
    run_and_report(database, assignment, options, out, as_json)


def check_models(models: ModelSettings) -> None:
    try:
        require_models(models)
    except DisaggError as error:
        raise GraderError(f"{error}; or grade with --endpoint URL, or with --no-models") from None


def run_and_report(
    database: Database, assignment: Assignment, options: WorkerOptions, out: Console, as_json: bool
) -> None:
    began_at = time.time()
    with watching(out) as look:
        state = run_batch(database, assignment, options, look)
    found = grades(database, assignment)
    if as_json:
        print(json.dumps({"assignment": assignment.name, "grades": [as_data(one) for one in found]}))
        return
    plain_out = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    plain_out.print(grade_table(found))
    checked = finished_since(database, began_at, "checks"), finished_since(database, began_at, "models")
    plain_out.print(
        f"done now: {checked[0]} checked, {checked[1]} read by the models, in {time.time() - began_at:.1f} s"
    )
    _say_what_is_left(plain_out, database, state, found)


def _say_what_is_left(out: Console, database: Database, state: BatchProgress, found: list[Grade]) -> None:
    for pseudonym, error in state.failures:
        out.print(f"{pseudonym} failed: {error}")
    if state.models.left:
        out.print(
            f"{state.models.left} wait for the models ({state.waiting_reason}); the same command goes on with them"
        )
    folder = database.path.parent
    if open_count := sum(one.score.needs_review for one in found):
        out.print(f"{open_count} need a look: disagg-grade review --book {folder} PSEUDONYM")
    if changed := sum(one.is_changed for one in found):
        out.print(f"{changed} changed since you approved them, and need it again")
    out.print(f"nothing is released before you approve it: disagg-grade review --book {folder} --approve-all")


@contextmanager
def watching(out: Console) -> Iterator[Callable[[Watched], None]]:
    """A bar for each stage on a terminal, else a line now and then."""
    if out.is_terminal:
        with _Bars(out) as bars:
            yield bars.look
        return
    yield _Lines(out).look


class _Lines:
    def __init__(self, out: Console, timeouts: ProgramTimeouts = ProgramTimeouts()) -> None:
        self._out, self._every_s, self._next_s = out, timeouts.line_s, 0.0

    def look(self, seen: Watched) -> None:
        if seen.elapsed_s >= self._next_s and not seen.progress.is_over:
            self._next_s = seen.elapsed_s + self._every_s
            self._out.print(f"{batch_line(seen.progress)}{time_left(seen)}")


class _Bars:
    def __init__(self, out: Console) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self._bars = Bars(*columns, console=out)
        self._checks = self._bars.add_task("checks", total=None, note="")
        self._models = self._bars.add_task("models", total=None, note="", visible=False)

    def __enter__(self) -> "_Bars":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def look(self, seen: Watched) -> None:
        state = seen.progress
        checked, read = state.checks, state.models
        self._bars.update(
            self._checks, total=checked.total, completed=checked.done + checked.failed, note=time_left(seen)
        )
        note = f"waiting: {state.waiting_reason}" if state.waiting_reason and not read.running else ""
        total = read.total + checked.left if read.total else 0
        done = read.done + read.failed
        self._bars.update(self._models, total=total, completed=done, visible=bool(read.total), note=note)


def time_left(seen: Watched) -> str:
    if seen.eta_s is None:
        return ""
    minutes, seconds = divmod(round(seen.eta_s), 60)
    return f", about {minutes} min {seconds:02d} s left" if minutes else f", about {seconds} s left"
