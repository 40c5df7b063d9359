"""`demo`: a synthetic class, the embedded model, grades and reports. Nothing in it is of a real student."""

import time
from pathlib import Path
from typing import Literal, cast

from rich.console import Console

from grader.cli.grade import watching
from grader.cli.show import console, grade_table
from grader.errors import GraderError
from grader.export import write_reports
from grader.grading import GradeSettings, figures_line, grades, model_figures
from grader.intake import Owner, read_files, take_in
from grader.local_cluster import local_cluster
from grader.models import ModelSettings
from grader.rubric import dump_rubric, load_rubric
from grader.store import FILE_NAME, Assignment, Database, StudentIdentity, save_assignment
from grader.synthetic import SyntheticClass, make_class
from grader.worker import WorkerOptions, queue_all, run_batch

_MODEL = "smollm2"
# A small model writes long when it has nothing to say.
_ANSWER_TOKENS, _TEXT_CHARS, _REMARKS = 300, 60, 1


def run_demo(folder: Path, models: bool, language: str, students: int) -> None:
    if language not in ("python", "r"):
        raise GraderError(f"--language {language}: choose python or r")
    if folder.exists() and any(folder.iterdir()) and not (folder / FILE_NAME).exists():
        raise GraderError(f"{folder} has other files: choose another folder for the demo")
    out = console()
    database, assignment = prepare_class(folder, make_class(cast(Literal["python", "r"], language), students=students))
    out.print(f"{folder}: a synthetic class of {students}, with rubric, solution and template")
    began = time.monotonic()
    if models:
        _grade_with_models(database, assignment, out)
    else:
        queue_all(database, assignment, GradeSettings())
        _run(database, assignment)
    _report(database, assignment, folder, out, time.monotonic() - began)


def prepare_class(folder: Path, made: SyntheticClass) -> tuple[Database, Assignment]:
    """The class in a new grade book, under pseudonyms."""
    made.write(folder)
    rubric = load_rubric(made.rubric, str(folder / "rubric.yaml"))
    database = Database.create(folder)
    assignment = save_assignment(
        database,
        rubric.assignment,
        dump_rubric(rubric),
        solution=made.solution,
        template=made.template,
        inputs=made.inputs,
    )
    stems = {Path(one.file_name).stem: one.student for one in made.submissions}
    roster = {stem: Owner(StudentIdentity(key=stem, name=student)) for stem, student in stems.items()}
    take_in(database, assignment, read_files([folder / "submissions"], roster))
    return database, assignment


def _grade_with_models(database: Database, assignment: Assignment, out: Console) -> None:
    out.print("starting a prefill node, a decode node and a gateway with the embedded model on this machine ...")
    with local_cluster() as cluster:
        out.print(f"ready: {cluster.url}; both layers of models use {_MODEL}, which is far too small to judge")
        settings = ModelSettings(
            code_model=_MODEL,
            feedback_model=_MODEL,
            config=cluster.config,
            code_tokens=_ANSWER_TOKENS,
            feedback_tokens=_ANSWER_TOKENS,
            text_chars=_TEXT_CHARS,
            remarks=_REMARKS,
        )
        queue_all(database, assignment, GradeSettings(models=settings))
        _run(database, assignment)


def _run(database: Database, assignment: Assignment) -> None:
    with watching(Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)) as look:
        # One notebook at a time: the first fills the prefix cache for the class, and a machine has no more cores.
        run_batch(database, assignment, WorkerOptions(model_threads=1, patience_s=30.0), look)


def _report(database: Database, assignment: Assignment, folder: Path, out: Console, took_s: float) -> None:
    found = grades(database, assignment)
    files = write_reports(folder / "reports", found, {}, found[0].rubric.title)
    out.print(grade_table(found))
    if read := [one.models for one in found if one.models]:
        out.print(figures_line(model_figures(read)))
    one = f"disagg-grade review {found[0].submission.pseudonym} --book {folder}"
    looks = [
        f"{files[0]}  (a report; the others are beside it)",
        f"disagg-grade status --book {folder} --alike",
        one,
        *([f"{one} --prompts"] if read else []),
        f"disagg-grade export --book {folder} --all",
    ]
    out.print(f"{len(found)} submissions graded in {took_s:.0f} s. Look at:", *looks, sep="\n  ")
