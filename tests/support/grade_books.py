"""A grade book with an assignment and a class, made in a test."""

from decimal import Decimal
from pathlib import Path

from grader.grading import GradeSettings
from grader.rubric import dump_rubric, load_rubric
from grader.store import Assignment, Database, StudentIdentity, add_submission, save_assignment
from grader.worker import Worker, WorkerOptions, WorkerTimeouts, queue_all
from tests.support.notebooks import code, notebook_bytes, printed, text

RUBRIC = """
assignment: sales
title: Sales by region
instructions: Compute the mean of the sales.
ai_share_max: 0.5
items:
  - {id: data, title: The data is in sales, points: 2, check: {kind: variables, names: [sales]}}
  - id: mean
    title: The mean is right
    points: 4
    check: {kind: output, where: {variable: mean_sales}, compare: number}
  - id: names
    title: Clear names
    points: 2
    ai_share: 1
    guideline: One-letter names are not clear.
    check: {kind: model, question: "Do the variables have clear names?"}
  - {id: style, title: Good style, points: 2, check: {kind: model, question: "Is the style good?"}}
"""


def work(mean: float = 20, name: str = "sales", words: str = "I think the north sells best.") -> bytes:
    """A student's notebook: right points for `data` and `mean` with the defaults."""
    return notebook_bytes(
        text("# Sales"),
        code(f"{name} = [10, 20, 30]"),
        code(f"mean_sales = sum({name}) / len({name})\nprint(mean_sales)", printed(f"{mean}\n")),
        text(words),
    )


def make_book(folder: Path, rubric: str = RUBRIC) -> tuple[Database, Assignment]:
    database = Database.create(folder)
    return database, save_assignment(database, "sales", dump_rubric(load_rubric(rubric)), solution=work())


def known_points(submission_id: int) -> Decimal:
    """Of layers 1 and 2, for the class below. Ids count from 1."""
    number = submission_id - 1
    if number % 10 == 9:
        return Decimal(0)
    return Decimal(6 if number % 3 else 2)


def add_class(database: Database, assignment: Assignment, count: int) -> list[int]:
    """Every third is wrong, every tenth is no notebook."""
    made = []
    for number in range(count):
        content = (
            b"not a notebook" if number % 10 == 9 else work(mean=20 if number % 3 else 21, words=f"Work {number}.")
        )
        identity = StudentIdentity(key=f"student{number}", name=f"Given{number} Family{number}")
        made.append(add_submission(database, assignment.id, identity, f"s{number}.ipynb", content).id)
    return made


def graded_book(folder: Path, count: int = 4) -> tuple[Database, Assignment]:
    """Layers 1 and 2, in this process."""
    database, assignment = make_book(folder)
    add_class(database, assignment, count)
    grade_here(database, assignment)
    return database, assignment


def grade_here(database: Database, assignment: Assignment, settings: GradeSettings | None = None) -> None:
    queue_all(database, assignment, settings or GradeSettings())
    quick = WorkerTimeouts(poll_s=0.01, watch_s=0.01)
    assert Worker(database.path.parent, WorkerOptions(timeouts=quick)).run() == 0
