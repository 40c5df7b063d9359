"""Reports, reviews and looks of an instructor: what each option does to the grade book."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from grader import web
from grader.cli.grade import time_left
from grader.cli.main import app
from grader.grading import Grade, GradeSettings, grades, override
from grader.store import Assignment, Database, StoredAnswer, progress, put_answer, reveals
from grader.worker import queue_all, watched
from tests.support.grade_books import add_class, graded_book


@pytest.fixture
def book(tmp_path: Path) -> tuple[Database, Assignment]:
    return graded_book(tmp_path / "book")


def _run(book: tuple[Database, Assignment], *arguments: str) -> str:
    found = CliRunner().invoke(app, [*arguments, "--book", str(book[0].path.parent)], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.stdout


def _decided(book: tuple[Database, Assignment]) -> Grade:
    """The first, without open items."""
    first = grades(*book)[0]
    for item in ("names", "style"):
        override(book[0], first, item, "1", "ann", "looked at it")
    return first


def test_report_writes_what_it_says(book: tuple[Database, Assignment], tmp_path: Path) -> None:
    student = grades(*book)[0].submission.pseudonym
    told = _run(book, "report", student, "--output", str(tmp_path / "one"))
    assert [Path(line) for line in told.splitlines()] == list((tmp_path / "one").iterdir())
    assert student in (tmp_path / "one" / f"{student}.html").read_text(encoding="utf-8")
    told = _run(book, "report", "--output", str(tmp_path / "all"))
    assert {Path(line) for line in told.splitlines()} == set((tmp_path / "all").iterdir())
    assert len(told.splitlines()) == 4


def test_reveal_shows_the_name_and_is_noted(book: tuple[Database, Assignment]) -> None:
    student = grades(*book)[0].submission
    assert "Given" not in _run(book, "review", student.pseudonym)
    assert reveals(book[0]) == []
    assert "Given" in _run(book, "review", student.pseudonym, "--reveal", "--why", "a call", "--who", "ann")
    assert [(one.who, one.why) for one in reveals(book[0])] == [("ann", "a call")]


def test_prompts_show_what_was_asked_and_answered(book: tuple[Database, Assignment]) -> None:
    student = grades(*book)[0].submission
    prompt = json.dumps({"messages": [{"role": "user", "content": "Is it clear?"}]})
    said = StoredAnswer(
        layer="code", reading=0, model="coder", prompt=prompt, answer='{"a": 1}', error="", figures="{}", at=1.0
    )
    put_answer(book[0], student.id, student.current_key or "", said)
    assert "Is it clear?" not in _run(book, "review", student.pseudonym)
    told = _run(book, "review", student.pseudonym, "--prompts")
    assert "code model coder, reading 1" in told
    assert "[user]\nIs it clear?\n[answer]\n" in told


def test_approve_all_takes_only_what_is_decided_and_reopen_takes_it_back(book: tuple[Database, Assignment]) -> None:
    student = _decided(book).submission.pseudonym
    assert "1 approved; 3 have open items or flags" in _run(book, "review", "--approve-all")
    assert [one.submission.pseudonym for one in grades(*book) if one.approved] == [student]
    assert "0 approved; 3 have" in _run(book, "review", "--approve-all")
    _run(book, "review", student, "--reopen", "--why", "a question")
    assert not any(one.approved for one in grades(*book))


def test_status_flagged_leaves_out_what_needs_no_look(book: tuple[Database, Assignment]) -> None:
    student = _decided(book).submission.pseudonym
    assert student in _run(book, "status")
    told = _run(book, "status", "--flagged")
    assert student not in told
    assert all(one.submission.pseudonym in told for one in grades(*book)[1:])


def test_the_pages_listen_on_this_machine_unless_told(
    book: tuple[Database, Assignment], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = []
    monkeypatch.setattr(web, "run_web", lambda settings, host, port, file: hosts.append(host))
    _run(book, "web")
    _run(book, "web", "--host", "0.0.0.0")
    assert hosts == ["127.0.0.1", "0.0.0.0"]


def test_a_running_batch_tells_how_long(book: tuple[Database, Assignment]) -> None:
    """Four are done in 8 s and six wait: 12 s."""
    database, assignment = book
    add_class(database, assignment, 10)
    queue_all(database, assignment, GradeSettings())
    state = progress(database, assignment.id)
    assert time_left(watched(database, state, 0.0, 8.0)) == ", about 12 s left"
    assert time_left(watched(database, state, 0.0, 80.0)) == ", about 2 min 00 s left"
