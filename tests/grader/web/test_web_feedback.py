"""Feedback and verdicts of a simulated model in a real browser, with hostile text put into them on their way. The
pages show it as text, and flag what contradicts the points. The embedded model: test_web_browser.py."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from grader.export import report_html
from grader.grading import Grade, GradeSettings, grades
from grader.local_cluster import local_cluster
from grader.models import ModelSettings
from grader.sandbox import why_unavailable
from grader.store import Assignment, Database, StudentIdentity, add_submission, progress
from grader.worker import WorkerOptions, queue_all, run_batch
from tests.support.grade_books import make_book, work
from tests.support.grade_pages import EVIL, SOON_MS, opened, visit, web
from tests.support.hostile_models import hostile_models
from tests.support.waiting import until

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytest.importorskip("streamlit", reason="Streamlit is not installed")
pytestmark = pytest.mark.slow

_FAST = "custom:prefill=50000,decode=2000"
_LINE = "sales = [10, 20, 30]"


def _alter(said: dict[str, Any]) -> dict[str, Any]:
    """The model's own answer, with our text in it. It praises `mean`, which earned nothing."""
    if "strengths" not in said:
        yes = {"quote": _LINE, "answer": "yes", "confidence": "high"}
        return {item: yes | {"reason": f"{answer['reason']} {EVIL}"} for item, answer in said.items()}
    praise = {"item": "mean", "text": f"{said['strengths'][0]['text']} {EVIL}"}
    better = {"item": "general", "what": EVIL, "why": EVIL, "how": EVIL, "example": EVIL}
    reflection = said["reflection"] | {"comment": EVIL}
    return said | {
        "strengths": [praise],
        "improvements": [better],
        "reflection": reflection,
        "instructor_comment": f"{said['instructor_comment']} {EVIL}",
    }


def _graded(book: Database, assignment: Assignment) -> Grade:
    """Short texts: the small model ends its JSON within the tokens that it has."""
    add_submission(book, assignment.id, StudentIdentity(key="a"), "a.ipynb", work(mean=21))
    with local_cluster(f"{_FAST},{_FAST}") as cluster, hostile_models(cluster.url, _alter) as url:
        models = ModelSettings(
            code_model="simulated:qwen3-30b-a3b",
            feedback_model="simulated:qwen3-30b-a3b",
            endpoint=url,
            code_tokens=400,
            feedback_tokens=800,
            text_chars=4,
        )
        queue_all(book, assignment, GradeSettings(models=models))
        run_batch(book, assignment, WorkerOptions(), lambda _: None)
    assert progress(book, assignment.id).models.done == 1, progress(book, assignment.id)
    grade = grades(book, assignment)[0]
    assert grade.models
    assert [run.problem for run in grade.models.runs] == ["", ""]
    return grade


def test_hostile_feedback_is_text_and_its_contradiction_a_flag(tmp_path: Path) -> None:
    book, assignment = make_book(tmp_path)
    grade = _graded(book, assignment)
    assert {one.item_id: one.points for one in grade.verdicts} == {"data": 2, "mean": 0, "names": 2, "style": 0}
    with web(tmp_path) as url, opened(url) as page:
        visit(page, "Review")
        page.get_by_text("feedback_contradicts: the feedback praises mean, which earned no points").wait_for()
        shown = _expanded(page, "Feedback (a draft until you approve)").get_by_test_id("stCode")
        assert until(lambda: shown.inner_text().count(EVIL) == 7, SOON_MS / 1000), shown.inner_text()
        assert page.locator(".nb mark").all_inner_texts().count(_LINE) == 1  # the line that the verdict rests on
        reason = _expanded(page, "names: 2 of 2")
        assert until(lambda: EVIL in reason.inner_text(), SOON_MS / 1000), reason.inner_text()
        assert f"cell 2: {_LINE}" in reason.inner_text()
        assert EVIL in _expanded(page, "Raw prompts and answers").inner_text().replace('\\"', '"')
        assert page.locator("img[src=x]").count() == 0
        assert page.locator("[data-testid=stMain] a[href^=javascript]").count() == 0
        assert page.get_by_test_id("stMain").locator("strong").count() == 0
        _look_at_outputs(page, book, assignment)
        _look_at_report(page, tmp_path / "report.html", report_html(grade, "Sales", "a student"))


def _look_at_outputs(page: "Page", book: Database, assignment: Assignment) -> None:
    """The file says 21, and the code prints 20. The page says which of them it shows."""
    page.get_by_text("Outputs as the student saved them: the notebook was not run again.").wait_for()
    assert page.locator(".nb pre.output").all_inner_texts() == ["21"]
    if why_unavailable():
        return
    queue_all(book, assignment, GradeSettings(rerun=True))
    run_batch(book, assignment, WorkerOptions(), lambda _: None)
    page.reload()
    page.get_by_text("Outputs of the re-run in the sandbox: the points rest on these").wait_for()
    assert until(lambda: page.locator(".nb pre.output").all_inner_texts() == ["20.0"], SOON_MS / 1000)


def _expanded(page: "Page", title: str) -> "Locator":
    box = page.get_by_test_id("stExpander").filter(has=page.locator("summary", has_text=title))
    box.wait_for()
    if box.locator("details").get_attribute("open") is None:
        box.locator("summary").click()
    box.get_by_test_id("stExpanderDetails").wait_for()
    return box


def _look_at_report(page: "Page", path: Path, html: str) -> None:
    path.write_text(html, encoding="utf-8")
    page.goto(path.as_uri())
    assert page.locator("img, script, a, strong").count() == 0
    assert (
        page.locator("body").inner_text().count(EVIL) == 8
    )  # two reasons, six parts of the feedback: not what is for the instructor alone
