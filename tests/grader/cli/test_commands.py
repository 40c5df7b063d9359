"""`disagg-grade` as an instructor types it, mistakes included."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from grader.cli.main import app
from grader.errors import GraderError
from grader.store import Database
from tests.support.grade_books import RUBRIC, graded_book, work


def _run(*arguments: str) -> str:
    """Its output. Our errors are raised."""
    found = CliRunner().invoke(app, list(arguments), catch_exceptions=True)
    if isinstance(found.exception, GraderError | OSError):
        raise found.exception
    assert found.exit_code == 0, found.output
    return found.stdout


def _fails(*arguments: str) -> str:
    with pytest.raises((GraderError, OSError)) as failed:
        _run(*arguments)
    return str(failed.value)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "rubric.yaml").write_text(RUBRIC)
    (tmp_path / "solution.ipynb").write_bytes(work())
    (tmp_path / "class").mkdir()
    for number, mean in enumerate((20, 21, 20)):
        (tmp_path / "class" / f"doe{number}_{number}_{number}_hw.ipynb").write_bytes(work(mean, words=f"Work {number}"))
    return tmp_path


@pytest.fixture
def book(tmp_path: Path) -> str:
    database, _ = graded_book(tmp_path / "book")
    database.close()
    return str(tmp_path / "book")


def test_help_names_every_command() -> None:
    told = _run("--help")
    for command in (
        "init", "check-rubric", "import", "grade", "status", "export", "report", "review", "agreement", "regrade",
        "demo", "web", "bench",
    ):  # fmt: skip
        assert re.search(rf"^\W*{command}\s", told, re.MULTILINE), command


def test_init_starts_with_an_example_that_is_valid(tmp_path: Path) -> None:
    assert "rubric.yaml" in _run("init", str(tmp_path / "new"))
    assert "No mistakes found" in _run("check-rubric", str(tmp_path / "new" / "rubric.yaml"))
    told = _run("init", str(tmp_path / "new"), "--rubric", str(tmp_path / "new" / "rubric.yaml"))
    assert "rubric version 1, 12 points" in told


@pytest.mark.slow
def test_from_files_to_reports(files: Path) -> None:
    """As processes: the command, and the worker that it starts."""
    book = str(files / "book")
    _run("init", book, "--rubric", str(files / "rubric.yaml"), "--solution", str(files / "solution.ipynb"))
    command = [sys.executable, "-m", "grader.cli", "grade", str(files / "class"), "--book", book, "--no-models"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "120"})
    assert done.returncode == 0, done.stderr
    assert "3 files, 3 of them new" in done.stderr
    assert "3 checked" in done.stdout
    assert "doe1" not in done.stdout + done.stderr  # no name, also not of a file
    assert sorted(one["total"] for one in json.loads(_run("status", "--book", book, "--json"))["grades"]) == [
        "2",
        "6",
        "6",
    ]
    again = subprocess.run(command, capture_output=True, text=True)
    assert "0 of them new" in again.stderr
    assert "done now: 0 checked" in again.stdout
    _run("export", "--book", book, "--all", "--output", str(files / "out"), "--zip")
    assert (files / "out.zip").is_file()
    assert len(list((files / "out" / "reports").glob("student-*.html"))) == 3
    log = (files / "book" / "worker.log").read_text()
    assert "doe" not in log


def test_review_decides_and_takes_back(book: str) -> None:
    student = json.loads(_run("status", "--book", book, "--json"))["grades"][0]["student"]
    told = _run("review", student, "--book", book, "--item", "mean", "--points", "1", "--why", "partly", "--who", "ann")
    assert "set by ann: partly" in told.replace("\n", " ")
    _run("review", student, "--book", book, "--comment", "Well done.", "--keep")
    for item in ("names", "style"):
        _run("review", student, "--book", book, "--item", item, "--points", "2", "--why", "clear")
    assert "approved" in _run("review", student, "--book", book, "--approve")
    told = _run("review", student, "--book", book, "--undo", "--history")
    assert "taken back: approve" in told
    assert "ann points mean" in told
    assert "mean" in _run("review", "--book", book, "--item", "mean")


def test_agreement_of_points_by_hand(book: str, tmp_path: Path) -> None:
    assert "no submission has points of a human" in _fails("agreement", "--book", book)
    rows = ["pseudonym,data,mean"]
    for grade in json.loads(_run("status", "--book", book, "--json"))["grades"]:
        rows.append(f"{grade['student']},{grade['items']['data']},{grade['items']['mean']}")
    (tmp_path / "hand.csv").write_text("\n".join(rows))
    told = json.loads(_run("agreement", "--book", book, "--by-hand", str(tmp_path / "hand.csv"), "--json"))
    assert told["totals"]["exact"] == 1
    assert told["items"]["mean"]["kappa"] == 1
    assert "at least 5" in _run("agreement", "--book", book, "--by-hand", str(tmp_path / "hand.csv"))


def test_errors_say_what_to_do(book: str, tmp_path: Path) -> None:
    assert "disagg-grade init" in _fails("status", "--book", str(tmp_path))
    assert "no assignment is named hw9; the grade book has: sales" in _fails("status", "--book", book, "-a", "hw9")
    assert "does not exist" in _fails("grade", str(tmp_path / "nothing.zip"), "--book", book, "--no-models")
    assert "none of 4 grades is approved" in _fails("export", "--book", book)
    assert "lists the pseudonyms" in _fails("review", "student-zzz", "--book", book)
    (tmp_path / "cluster.json").write_text("{}")
    told = _fails("grade", "--book", book, "--config", str(tmp_path / "cluster.json"))
    assert "--no-models" in told
    assert "cluster.json" in told
    (tmp_path / "bad.yaml").write_text(RUBRIC.replace("points: 4", "pionts: 4"))
    told = _fails("check-rubric", str(tmp_path / "bad.yaml"))
    assert "did you mean `points`" in told
    assert ":10:" in told  # the line
    (tmp_path / "no.ipynb").write_text("no notebook")
    (tmp_path / "rubric.yaml").write_text(RUBRIC)
    wrong = str(tmp_path / "no.ipynb")
    assert "no.ipynb" in _fails("init", book, "--rubric", str(tmp_path / "rubric.yaml"), "--solution", wrong)


def test_an_error_is_one_line_and_with_json_also_json(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "grader.cli", "status", "--book", str(tmp_path), "--json"]
    failed = subprocess.run(command, capture_output=True, text=True)
    assert failed.returncode == 1
    assert failed.stderr.startswith("error: ")
    assert len(failed.stderr.splitlines()) == 1
    assert json.loads(failed.stdout)["error"]["code"] == "GradeBookError"


@pytest.mark.slow
def test_the_demo_without_models(tmp_path: Path) -> None:
    """Its class, grades and reports; the models' part needs nodes, and has tests of its own."""
    folder = tmp_path / "demo"
    command = [sys.executable, "-m", "grader.cli", "demo", str(folder), "--no-models", "--students", "3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "3 submissions graded" in done.stdout
    assert len(list((folder / "reports").glob("*.html"))) == 3
    (tmp_path / "other.txt").write_text("mine")
    assert "has other files" in _fails("demo", str(tmp_path), "--no-models")
    assert "choose python or r" in _fails("demo", str(folder), "--language", "julia")


def test_import_makes_a_rubric_of_another_shape(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text('{"Loading": {"points": 5, "description": "The data is loaded"}}')
    told = _run("import", str(tmp_path / "old.json"), "-o", str(tmp_path / "new.yaml"))
    assert "1 items, 5 points" in told
    assert "No mistakes found" in _run("check-rubric", str(tmp_path / "new.yaml"))
    assert "--force" in _fails("import", str(tmp_path / "old.json"), "-o", str(tmp_path / "new.yaml"))
    (tmp_path / "list.json").write_text("[1, 2]")
    assert "a rubric is a mapping" in _fails("import", str(tmp_path / "list.json"), "-o", str(tmp_path / "x.yaml"))


@pytest.mark.slow
def test_regrade_shows_the_difference(book: str, tmp_path: Path) -> None:
    (tmp_path / "new.yaml").write_text(RUBRIC.replace("names: [sales]", "names: [sales, regions]"))
    told = json.loads(_run("regrade", "--book", book, "--rubric", str(tmp_path / "new.yaml"), "--diff", "--json"))
    assert len(told) == 4
    assert {name for one in told for name in one["items"]} == {"data"}


def test_odd_points_and_texts_are_refused_in_words(book: str, tmp_path: Path) -> None:
    student = json.loads(_run("status", "--book", book, "--json"))["grades"][0]["student"]
    for points in ("nan", "inf", "-inf", "many", "1e-999"):
        assert "points" in _fails("review", student, "--book", book, "--item", "mean", "--points", points, "--why", "x")
    assert "name it with --item" in _fails("review", student, "--book", book, "--points", "1", "--why", "x")
    latin = tmp_path / "latin.csv"
    latin.write_bytes("key,name\na,Zo\u00eb\n".encode("latin-1"))
    assert "UTF-8" in _fails("check-rubric", str(latin))
    assert "UTF-8" in _fails("grade", "--book", book, "--no-models", "--roster", str(latin))
    assert "UTF-8" in _fails("agreement", "--book", book, "--by-hand", str(latin))


def test_review_of_an_item_shows_what_graders_are_told(book: str) -> None:
    told = _run("review", "--book", book, "--item", "names")
    assert "Clear names (2 points)" in told
    assert "guideline: One-letter names are not clear." in told


def test_a_grade_book_that_cannot_be_used_is_told_in_one_line(book: str) -> None:
    """Another program holds it, the disk is full, or it is damaged, as here."""
    Database.open(Path(book)).connection.execute("ALTER TABLE jobs RENAME TO lost")
    command = [sys.executable, "-m", "grader.cli", "status", "--book", book]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "error: the grade book cannot be used: no such table: jobs\n")


def test_an_export_tells_of_files_from_before(book: str, tmp_path: Path) -> None:
    """They may have names, or grades that are drafts again."""
    output = str(tmp_path / "out")
    assert "earlier export" not in _run("export", "--book", book, "--all", "--names", "--output", output)
    assert "earlier export" not in _run("export", "--book", book, "--all", "--names", "--output", output)
    told = _run("export", "--book", book, "--all", "--output", output)
    assert "from an earlier export: canvas.csv, moodle.csv, reports" in told
