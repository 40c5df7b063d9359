"""`disagg-grade web` in a real browser, with the embedded model: from a rubric to an export, with hostile uploads."""

import csv
import io
import json
import os
import re
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from grader.grading import grades
from grader.local_cluster import local_cluster
from grader.store import Assignment, Database, assignment, history, live_workers, progress, reveals, submissions
from tests.support.grade_books import RUBRIC, work
from tests.support.grade_pages import EVIL, MODELS_S, SOON_MS, fill, opened, press, settle, upload, visit, web
from tests.support.notebooks import code, notebook_bytes, printed, text
from tests.support.waiting import until

if TYPE_CHECKING:
    from playwright.sync_api import Download, Locator, Page

pytest.importorskip("streamlit", reason="Streamlit is not installed")
pytestmark = pytest.mark.slow


def class_zip() -> bytes:
    """Names as Canvas gives them. One is hostile in its name, its code, its text and its outputs."""
    evil = notebook_bytes(text(EVIL), code(f"sales = [1]  # {EVIL}", printed(EVIL)), code(f"mean_sales = '{EVIL}'"))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../../../tmp/escape_101_1_hw.ipynb", work())
        archive.writestr(f"{EVIL.replace('/', '')}.ipynb", evil)
        archive.writestr("__MACOSX/._escape_101_1_hw.ipynb", b"rubbish")
    return buffer.getvalue()


# The worker waits before it connects to a model, until the file is there: in the middle of the batch.
_HOLD = """\
import os, sys, time
def hold(event, arguments):
    while event == "socket.connect" and not os.path.exists({go!r}):
        time.sleep(0.02)
if "grader.worker" in sys.orig_argv:
    sys.addaudithook(hold)
"""


def test_a_class_from_rubric_to_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = tmp_path / "hold" / "go"
    go.parent.mkdir()
    (go.parent / "sitecustomize.py").write_text(_HOLD.format(go=str(go)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(go.parent), os.environ.get("PYTHONPATH", "")]).rstrip(":"))
    with local_cluster() as cluster, web(tmp_path, cluster.config) as url, opened(url) as page:
        book = Database.open(tmp_path)
        _make_assignment(page)
        chosen = assignment(book, "sales")
        _take_in(page, book, chosen)
        _grade(page, book, chosen, go)
        _decide(page, book, chosen)
        _export(page, book)


def _make_assignment(page: "Page") -> None:
    editor = page.get_by_label("Rubric (YAML or JSON)")
    flat = {"Loads": {"points": 2, "description": EVIL}, "Plots": {"points": "3 pts"}}
    upload(page, "Start from a file", "points.json", json.dumps(flat).encode())
    page.get_by_text("2 items are graded by a human").wait_for()
    page.get_by_text("5 points. Models may decide 0 of them.").wait_for()
    assert "id: plots" in editor.input_value()
    fill(page, editor, RUBRIC.replace("points: 4", "pionts: 4"))
    page.get_by_text("did you mean `points`?").wait_for()
    page.get_by_text(re.compile(r"line 10, column \d+")).first.wait_for()
    fill(page, editor, RUBRIC)
    page.get_by_text("10 points. Models may decide 2 of them.").wait_for()
    upload(page, "Solution", "solution.ipynb", work())
    press(page, "Save the assignment")
    page.get_by_text("Saved: rubric version 1, 10 points.").first.wait_for()


def _take_in(page: "Page", book: Database, chosen: Assignment) -> None:
    visit(page, "Submissions")
    upload(page, "Notebooks and ZIPs", "bomb.zip", _bomb())
    press(page, "Take in")
    page.get_by_text("bomb.zip has 5001 files; the limit is 5000").wait_for()
    assert submissions(book, chosen.id) == []
    upload(page, "Notebooks and ZIPs", "class.zip", class_zip())
    press(page, "Take in")
    page.get_by_text("2 files, 2 of them new").first.wait_for()
    assert not list(Path("/tmp").glob("escape_101*"))


def _bomb() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(5001):
            archive.writestr(f"{number}.ipynb", b"")
    return buffer.getvalue()


def _grade(page: "Page", book: Database, chosen: Assignment, go: Path) -> None:
    page.get_by_text("Ask the models (layers 3 and 4)").click()
    settle(page)
    page.get_by_text("Which models").click()
    fill(page, page.get_by_label("Code model", exact=True), "smollm2")
    fill(page, page.get_by_label("Feedback model", exact=True), "smollm2")
    fill(page, page.get_by_label("Longest answer of the code model, tokens"), "40")
    fill(page, page.get_by_label("Longest feedback, tokens"), "40")
    press(page, "Grade")
    page.get_by_text("2 new in the queue.").first.wait_for()
    _in_the_middle(page)
    before = live_workers(book)
    page.reload()
    _in_the_middle(page)
    assert not progress(book, chosen.id).is_over
    assert live_workers(book) == before != []
    go.touch()
    page.goto("about:blank")
    assert until(lambda: progress(book, chosen.id).is_over, MODELS_S), progress(book, chosen.id)
    page.go_back()
    page.get_by_text("The batch is over. See Results.").wait_for()
    page.get_by_text("read by the models: 2 of 2").wait_for()
    assert not progress(book, chosen.id).failures


def _in_the_middle(page: "Page") -> None:
    page.get_by_text("checked: 2 of 2").wait_for()
    page.get_by_text("read by the models: 0 of 2").wait_for()


def _decide(page: "Page", book: Database, chosen: Assignment) -> None:
    visit(page, "Results")
    page.get_by_test_id("stMetric").filter(has_text="Graded").get_by_text("2", exact=True).wait_for()
    visit(page, "Review")
    works = submissions(book, chosen.id)
    for place, one in enumerate(works):
        page.wait_for_url(f"**student={one.pseudonym}*")
        settle(page)
        assert until(lambda: page.locator(".nb").count() == 1, SOON_MS / 1000)
        assert page.locator(".nb img, .nb script, .nb a, .nb strong").count() == 0
        if place < len(works) - 1:
            press(page, "Next")
    last = works[-1]
    before = {one.submission.id: one for one in grades(book, chosen)}[last.id].score.total
    assert until(lambda: _wants_a_reason(page), SOON_MS / 1000)
    _set(page, book, last.id, "data", "0.5", f"by hand {EVIL}")
    press(page, "Undo")
    page.get_by_text("Taken back: points data").first.wait_for()
    assert {one.submission.id: one for one in grades(book, chosen)}[last.id].score.total == before
    _set_in_one_instant(page, ("data", "mean", "names"), "1.5", "by hand")
    assert until(lambda: len(_by_hand(book, last.id)) == 3, SOON_MS / 1000), history(book, last.id)
    _set(page, book, last.id, "style", "1.5", "by hand")
    assert _by_hand(book, last.id) == {item: "1.5" for item in ("data", "mean", "names", "style")}
    page.get_by_text(re.compile("6 of 10 points: graded")).wait_for()  # what is approved is what the page shows
    press(page, "Approve")
    page.get_by_text(re.compile("6 of 10 points: approved")).wait_for()
    assert [one.undone for one in history(book, last.id)][:1] == [True]
    grade = {one.submission.id: one for one in grades(book, chosen)}[last.id]
    assert grade.approved
    assert grade.score.total == 6


def _by_hand(book: Database, submission: int) -> dict[str, object]:
    return {one.item: one.after for one in history(book, submission) if one.action == "points" and not one.undone}


def _set_in_one_instant(page: "Page", items: tuple[str, ...], points: str, why: str) -> None:
    """Three clicks before the server can answer the first."""
    buttons = []
    for item in items:
        box = _filled(page, item, points, why)
        buttons.append(box.get_by_role("button", name="Set points").element_handle())
    page.evaluate("buttons => buttons.forEach(each => each.click())", buttons)
    settle(page)


def _set_points(page: "Page", item: str, points: str, why: str) -> None:
    _filled(page, item, points, why).get_by_role("button", name="Set points").click()
    settle(page)


def _set(page: "Page", book: Database, submission: int, item: str, points: str, why: str) -> None:
    """A page that is drawn again meanwhile forgets what was typed: then it is typed again."""

    def is_set() -> bool:
        _set_points(page, item, points, why)
        return until(lambda: _by_hand(book, submission).get(item) == points, SOON_MS / 4000)

    assert until(is_set, SOON_MS / 1000), history(book, submission)


def _wants_a_reason(page: "Page") -> bool:
    """The form may still be that of the student before: then it is filled in again."""
    _set_points(page, "data", "0.5", "")
    return page.get_by_text("needs a reason").count() > 0


def _filled(page: "Page", item: str, points: str, why: str) -> "Locator":
    box = page.get_by_test_id("stExpander").filter(has=page.locator("summary", has_text=f"{item}:"))
    assert until(lambda: box.get_by_label("Points").count() == 1, SOON_MS / 1000)  # those of before are gone
    if not box.get_by_label("Points").is_visible():
        box.locator("summary").click()
    box.get_by_label("Points").fill(points)
    box.get_by_label("Reason").fill(why)
    return box


def _export(page: "Page", book: Database) -> None:
    visit(page, "Cluster")
    page.locator(".cards .ok").wait_for()  # live health of the embedded model's nodes
    visit(page, "Export")
    page.get_by_text("1 of 2 grades are approved.").wait_for()
    page.get_by_text("With names, and tables for Canvas and Moodle").click()
    press(page, "Make the files")
    rows = list(csv.DictReader(io.StringIO(_downloaded(page, "grades.csv").decode("utf-8-sig"))))
    assert [(row["total"], row["state"]) for row in rows] == [("6", "approved")]
    names = zipfile.ZipFile(io.BytesIO(_downloaded(page, "all.zip"))).namelist()
    assert {"grades.csv", "canvas.csv", "moodle.csv"} < set(names)
    assert len(names) == 4
    assert len(reveals(book)) == 1


def _downloaded(page: "Page", name: str) -> bytes:
    with page.expect_download() as started:
        page.get_by_role("button", name=name).click()
    found: Download = started.value
    return Path(found.path()).read_bytes()
