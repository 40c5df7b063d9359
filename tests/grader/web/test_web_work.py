"""What an instructor does on the pages, run by Streamlit's own test runner: no browser is needed."""

import csv
import io
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from grader.export import find_browser
from grader.grading import Grade, GradeSettings, approve_grade, grades, override
from grader.intake import Incoming, owner_of, read_roster, take_in
from grader.models import ModelSettings
from grader.points import plain
from grader.sandbox import bubblewrap
from grader.store import (
    Assignment,
    Database,
    WorkerLock,
    assignment,
    blob,
    comment_bank,
    history,
    reveals,
    review_of,
    submission,
    submissions,
)
from grader.web import WebSettings, configure
from grader.worker import Worker, WorkerOptions, WorkerTimeouts
from tests.support.gateway import simulated_config, simulated_pair
from tests.support.grade_books import RUBRIC, add_class, grade_here, graded_book, make_book, work

testing = pytest.importorskip("streamlit.testing.v1", reason="Streamlit is not installed")

CANVAS = (
    "Student,ID,SIS User ID,SIS Login ID,Section,Sales (12)\r\n"
    "    Points Possible,,,,,10.00\r\n"
    '"Quill, Ada",101,S1,aquill,A,\r\n'
)


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Streamlit's test runner makes its script the main module."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.delenv("DISAGG_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)


def _opened(book: Path, page: str) -> Any:
    configure(WebSettings(book=book, who="teacher"))
    script = f"from grader.web.{page}_page import {page}_page\n{page}_page()\n"
    return testing.AppTest.from_string(script, default_timeout=60).run()


def _press(page: Any, label: str) -> list[str]:
    """What the page then says."""
    next(one for one in page.button if one.label == label).click()
    page.run()
    assert not page.exception
    return [one.value for one in page.success]


def _choose(page: Any, label: str, value: str) -> None:
    next(one for one in page.selectbox if one.label == label).set_value(value).run()


def test_a_comment_goes_into_the_bank_and_to_another_student(tmp_path: Path) -> None:
    database, chosen = graded_book(tmp_path, 2)
    first, second = (one.id for one in submissions(database, chosen.id))
    page = _opened(tmp_path, "review")
    _choose(page, "About", "mean")
    page.text_area(key=f"comment-{first}-mean-0").set_value("Round at the end.")
    page.checkbox(key=f"keep-{first}-mean-0").check()
    assert _press(page, "Save the comment") == ["Comment saved."]
    assert comment_bank(database, chosen.id) == [("mean", "Round at the end.")]
    _press(page, "Next")
    _choose(page, "About", "mean")
    _choose(page, "From the comment bank", "Round at the end.")
    assert page.text_area(key=f"comment-{second}-mean-1").value == "Round at the end."
    assert review_of(database, second).comments == {}
    assert _press(page, "Save the comment") == ["Comment saved."]
    assert [review_of(database, one).comments for one in (first, second)] == [{"mean": "Round at the end."}] * 2
    assert comment_bank(database, chosen.id) == [("mean", "Round at the end.")], "it is kept once"
    assert [one.action for one in history(database, second)] == ["comment"]


def test_a_look_at_a_name_is_logged(tmp_path: Path) -> None:
    database, _ = graded_book(tmp_path, 1)
    page = _opened(tmp_path, "review")
    assert not [one for one in page.text if "Given0" in one.value]
    page.text_input(key="why-1").set_value("she asked")
    told = ["The name is under Who is it?; the look is logged."]
    assert _press(page, "Reveal") == told
    assert "Given0 Family0, student0" in [one.value for one in page.text]
    assert _press(page, "Reveal") == told
    assert [(one.who, one.what, one.why) for one in reveals(database)] == [("teacher", [1], "she asked")]


def test_a_template_and_data_go_to_the_assignment(tmp_path: Path) -> None:
    database, before = graded_book(tmp_path, 1)
    page, key = _opened(tmp_path, "assignments"), f"files-{before.id}"
    page.file_uploader(key=f"{key}-template").upload("template.ipynb", b"no notebook").run()
    assert _press(page, "Save the assignment") == []
    assert "template.ipynb" in page.code[0].value
    assert assignment(database, "sales").template_sha is None
    template = work(words="Write here.")
    page.file_uploader(key=f"{key}-template").upload("template.ipynb", template)
    page.file_uploader(key=f"{key}-data").upload("sales.csv", b"a\n1\n").run()
    assert _press(page, "Save the assignment") == ["Saved: rubric version 1, 10 points."]
    after = assignment(database, "sales")
    assert blob(database, after.template_sha or "") == template
    assert {name: blob(database, sha) for name, sha in after.inputs.items()} == {"sales.csv": b"a\n1\n"}
    assert after.solution_sha == before.solution_sha
    assert "Files: solution, template, sales.csv." in page.text[0].value


def test_one_submission_is_graded_alone(tmp_path: Path) -> None:
    """A worker of this process: the page starts none."""
    database, chosen = make_book(tmp_path)
    add_class(database, chosen, 3)
    page, key = _opened(tmp_path, "submissions"), f"grade-{chosen.id}"
    page.selectbox(key=f"{key}-which").set_value(submission(database, 2).pseudonym).run()
    with WorkerLock(database):
        assert _press(page, "Grade") == ["1 new in the queue."]
    quick = WorkerTimeouts(poll_s=0.01, watch_s=0.01)
    assert Worker(tmp_path, WorkerOptions(timeouts=quick)).run() == 0
    assert [one.submission.id for one in grades(database, chosen)] == [2]


def _one_of_canvas(folder: Path) -> tuple[Database, Assignment, Grade]:
    database, chosen = make_book(folder)
    owner = owner_of("quillada_101_5_hw.ipynb", read_roster(CANVAS))
    take_in(database, chosen, [Incoming(owner=owner, file_name="hw.ipynb", content=work())])
    grade_here(database, chosen)
    for item in ("names", "style"):
        override(database, grades(database, chosen)[0], item, "1", "teacher", "by hand")
    return database, chosen, grades(database, chosen)[0]


@pytest.mark.skipif(find_browser() is None, reason="Chromium is not installed")
def test_pdf_and_gradebook_of_an_export(tmp_path: Path) -> None:
    database, _, grade = _one_of_canvas(tmp_path)
    page = _opened(tmp_path, "export")
    _press(page, "Make the files")
    assert "no grade is approved" in page.code[0].value
    approve_grade(database, grade, "teacher")
    page = _opened(tmp_path, "export")
    page.checkbox(key="export-pdf").check()
    page.file_uploader(key="export-table").upload("canvas.csv", CANVAS.encode())
    _press(page, "Make the files")
    made = page.session_state["export-files"].files
    rows = list(csv.reader(io.StringIO(made["canvas-filled.csv"].decode("utf-8-sig"))))
    assert (rows[2][0], rows[2][5]) == ("Quill, Ada", "8")
    with zipfile.ZipFile(io.BytesIO(made["all.zip"])) as packed:
        printed = [name for name in packed.namelist() if name.endswith(".pdf")]
        assert [packed.read(name)[:5] for name in printed] == [b"%PDF-"]
    assert [(one.who, one.why) for one in reveals(database)] == [("teacher", "export of sales")]


def test_without_a_sandbox_nothing_runs_and_the_pages_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests stay open, the other items have their points, a flag says why."""
    tested = "  - {id: tested, title: T, points: 3, check: {kind: tests, code: assert mean_sales == 20}}\nrerun: true\n"
    database, chosen = make_book(tmp_path, RUBRIC + tested)
    add_class(database, chosen, 2)
    bubblewrap.why_unavailable.cache_clear()
    try:
        with monkeypatch.context() as bare:
            bare.setenv("PATH", "/nowhere")
            grade_here(database, chosen)
    finally:
        bubblewrap.why_unavailable.cache_clear()
    assert len(grades(database, chosen)) == 2
    for grade in grades(database, chosen):
        assert [flag.code for flag in grade.flags] == ["not_rerun"]
        assert "runs no student code on this machine: bwrap" in grade.flags[0].message
        found = {one.item_id: (str(one.status), plain(one.points), plain(one.pending)) for one in grade.verdicts}
        assert found["tested"] == ("needs_review", "0", "3")
        assert found["data"][:2] == ("earned", "2")
        assert found["mean"][:2] == (("earned", "4") if grade.submission.id == 2 else ("not_earned", "0"))
    page = _opened(tmp_path, "review")
    caption = "Outputs as the student saved them: the re-run was not possible, see the flags."
    assert caption in [one.value for one in page.caption]
    assert any("not_rerun: The grader runs no student code" in one.value for one in page.code)


def test_an_answer_that_cannot_be_read_is_no_request_without_one(tmp_path: Path) -> None:
    """48 tokens are too few for the whole JSON of an answer."""
    book, assignment = make_book(tmp_path)
    add_class(book, assignment, 2)
    config = tmp_path / "cluster.json"
    with simulated_pair() as pair:
        config.write_text(json.dumps(simulated_config(*pair)))
        models = ModelSettings(
            code_model=(name := "simulated:tiny"),
            feedback_model=name,
            config=str(config),
            timeout_s=120,
            code_tokens=48,
            feedback_tokens=48,
        )
        grade_here(book, assignment, GradeSettings(models=models))
        page = _opened(tmp_path, "cluster")
    assert {one.label: one.value for one in page.metric}.items() >= {"Answers": "4", "Unusable": "4"}.items()
    assert any("stays open for you" in one.value for one in page.caption)
    assert "4 answers, 0 requests without one" in str(page.get("html")[0].proto.body)
