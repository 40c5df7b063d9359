"""Screenshots of the grader's pages over a class of 80: `make grade-screenshots`.

The class is synthetic. The programs' layers grade all of it; two simulated models read some works, and one is run again
in the sandbox. All pictures go into a folder to be looked at.
"""

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from grader.grading import GradeSettings, approve_grade, grades, override
from grader.local_cluster import LocalCluster, local_cluster
from grader.models import ModelSettings
from grader.sandbox import why_unavailable
from grader.store import submission
from grader.worker import WorkerOptions, queue_some, run_batch
from tests.support.grade_books import add_class, grade_here, make_book
from tests.support.grade_pages import opened, settle, visit, web

if TYPE_CHECKING:
    from playwright.sync_api import Page

_STUDENTS, _READ, _APPROVED, _RUN_AGAIN = 80, 6, 25, 78
_MODEL, _MACHINES = "simulated:qwen3-30b-a3b", "dgx-spark,m3-ultra"
_SIZES = {1440: 1300, 1024: 1300}
_PAGES = ("Assignments", "Submissions", "Results", "Review", "Statistics", "Cluster", "Export")
ROOT = Path(__file__).parents[2]


def graded_class(folder: Path, cluster: LocalCluster) -> str:
    """Some by hand, some approved, some read by models, one run again: its student."""
    book, assignment = make_book(folder)
    ids = add_class(book, assignment, _STUDENTS)
    grade_here(book, assignment)
    for grade in [one for one in grades(book, assignment) if one.checks.readable][:_APPROVED]:
        for item in ("names", "style"):
            override(book, grade, item, "1.5", "teacher", "read by hand")
    for grade in grades(book, assignment):
        if not grade.score.needs_review:
            approve_grade(book, grade, "teacher")
    models = ModelSettings(
        code_model=_MODEL, feedback_model=_MODEL, config=cluster.config, code_tokens=120, feedback_tokens=120
    )
    queue_some(book, assignment, GradeSettings(models=models), ids[:_READ])
    run_batch(book, assignment, WorkerOptions(model_threads=1), lambda _: None)
    if not why_unavailable():
        queue_some(book, assignment, GradeSettings(rerun=True), [ids[_RUN_AGAIN]])
        run_batch(book, assignment, WorkerOptions(), lambda _: None)
    return submission(book, ids[_RUN_AGAIN]).pseudonym


def _pictures(page: "Page", url: str, folder: Path, width: int, student: str) -> None:
    for name in _PAGES:
        visit(page, name)
        _shoot(page, folder / f"{name.lower()}-{width}.png")
    page.goto(f"{url}/review?student={student}")
    page.get_by_text("Outputs of the re-run" if not why_unavailable() else "Outputs as").wait_for()
    _shoot(page, folder / f"review-rerun-{width}.png")
    page.get_by_text("by question").click()
    page.get_by_label("Only open ones").wait_for(state="attached")
    _shoot(page, folder / f"by-question-{width}.png")


def _shoot(page: "Page", path: Path) -> None:
    settle(page)
    page.wait_for_timeout(1500)  # charts and tables are drawn after the run
    page.screenshot(path=path)


def run(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as home, local_cluster(_MACHINES) as cluster:
        student = graded_class(Path(home), cluster)
        with web(Path(home), cluster.config) as url:
            for width, height in _SIZES.items():
                with opened(url) as page:
                    page.set_viewport_size({"width": width, "height": height})
                    _pictures(page, url, folder, width, student)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "grade-screenshots")
    run(parser.parse_args().folder)
