"""Grades on their way out: what is in the files, what is not, and that nothing in them runs."""

import csv
import html
import io
import re
import zipfile
from pathlib import Path

import pytest

from grader.export import (
    PrinterMissing,
    as_csv,
    file_stem,
    find_browser,
    guarded,
    released,
    report_html,
    write_pdf,
    write_reports,
    write_tables,
    write_zip,
)
from grader.grading import Grade, approve_grade, grade_of, grades, override
from grader.store import Assignment, Database, StudentIdentity, add_submission, reveal, set_comment
from tests.support.grade_books import RUBRIC, add_class, grade_here, graded_book, make_book, work

_EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture
def book(tmp_path: Path) -> tuple[Database, Assignment]:
    return graded_book(tmp_path / "book")


def _approved(database: Database, assignment: Assignment) -> list[Grade]:
    """The first two."""
    for grade in grades(database, assignment)[:2]:
        for item in ("names", "style"):
            override(database, grade, item, "1.5", "ann", "looked at it")
        approve_grade(database, _again(database, grade), "ann")
    return grades(database, assignment)


def _again(database: Database, grade: Grade) -> Grade:
    found = grade_of(database, grade.submission)
    assert found
    return found


@pytest.mark.parametrize("cell", ["=1+1", "+1", "-cmd", "@SUM(A1)", "\t=1", " =1", "\r=1"])
def test_texts_are_no_formulas(cell: str) -> None:
    assert guarded(cell) == "'" + cell


def test_numbers_stay_numbers() -> None:
    assert as_csv([["name", -3, 2.5, None, "-"]]) == "name,-3,2.5,,-\r\n"


def test_only_approved_grades_leave_unless_asked(book: tuple[Database, Assignment]) -> None:
    found = _approved(*book)
    assert len(released(found, everything=False)) == 2
    assert len(released(found, everything=True)) == 4


def test_an_approval_is_of_a_total(book: tuple[Database, Assignment]) -> None:
    grade = _approved(*book)[0]
    assert grade.state == "approved"
    override(book[0], grade, "style", "0", "ann", "on second thought")
    after = _again(book[0], grade)
    assert after.state == "changed since approval"
    assert not released([after], everything=False)


def _rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8-sig"))))


def test_tables(book: tuple[Database, Assignment], tmp_path: Path) -> None:
    found = _approved(*book)
    identities = reveal(book[0], [one.submission.id for one in found], "ann", "export")
    write_tables(tmp_path / "named", found, identities, "sales")
    first = _rows(tmp_path / "named" / "grades.csv")[0]
    assert (first["names"], first["style"], first["state"]) == ("1.5", "1.5", "approved")
    items = sum(float(first[name]) for name in ("data", "mean", "names", "style", "caps_and_late"))
    assert items == float(first["total"])
    open_row = _rows(tmp_path / "named" / "grades.csv")[2]
    assert open_row["names"] == ""  # open: no number
    canvas = _rows(tmp_path / "named" / "canvas.csv")
    assert canvas[0]["Student"].strip() == "Points Possible"
    assert canvas[0]["sales"] == "10"
    assert canvas[1]["Student"].startswith("Given")
    moodle = _rows(tmp_path / "named" / "moodle.csv")
    assert moodle[0]["Maximum Grade"] == "10"
    assert [bool(row["sales"]) for row in canvas[1:]] == [True, True, False, False], "a sum of drafts is no grade"
    assert [bool(row["Grade"]) for row in moodle] == [True, True, False, False]
    written = write_tables(tmp_path / "nameless", found, {}, "sales")
    assert [path.name for path in written] == ["grades.csv"]
    assert "Given" not in written[0].read_text()


def test_an_item_may_have_the_name_of_a_column(tmp_path: Path) -> None:
    database, assignment = make_book(tmp_path / "book", RUBRIC.replace("id: mean", "id: total"))
    add_class(database, assignment, 2)
    grade_here(database, assignment)
    write_tables(tmp_path / "out", grades(database, assignment), {}, "sales")
    row = max(_rows(tmp_path / "out" / "grades.csv"), key=lambda each: float(each["total"]))
    assert (row["item total"], row["total"], row["names"], row["letter"]) == ("4", "6", "", "")


def test_a_report_is_escaped_and_needs_nothing_else(book: tuple[Database, Assignment]) -> None:
    database, assignment = book
    evil = add_submission(
        database, assignment.id, StudentIdentity(key="evil"), "e.ipynb", work(name=f"sales, x = 1, '{_EVIL}' #")
    )
    grade_here(database, assignment)
    set_comment(database, evil.id, "", _EVIL, "ann")
    grade = next(one for one in grades(database, assignment) if one.submission.id == evil.id)
    page = report_html(grade, f"Sales {_EVIL}", _EVIL)
    assert "<script" not in page
    assert "<img" not in page
    assert html.escape(_EVIL) in page
    assert not re.search(r"<[^>]*\s(?:src|href)\s*=", page)
    assert "Draft" in page
    assert "One-letter names are not clear" not in page  # a guideline is private


def test_reports_and_zip(book: tuple[Database, Assignment], tmp_path: Path) -> None:
    found = _approved(*book)
    files = write_reports(tmp_path / "out" / "reports", found, {}, "Sales")
    assert {path.stem for path in files} == {one.submission.pseudonym for one in found}
    assert "Draft" not in files[0].read_text()
    archive = write_zip(tmp_path / "out.zip", tmp_path / "out", files)
    assert zipfile.ZipFile(archive).namelist()[0].startswith("reports/student-")
    odd = {found[0].submission.id: StudentIdentity(key="../../etc/passwd", name="../ Jané/Doe ")}
    assert file_stem(found[0], odd) == f"Jané_Doe_{found[0].submission.pseudonym}"


@pytest.mark.slow
@pytest.mark.skipif(find_browser() is None, reason="needs Chromium or Chrome")
def test_pdf(book: tuple[Database, Assignment], tmp_path: Path) -> None:
    page = report_html(grades(*book)[0], "Sales: 売上", "student-1")
    write_pdf(page, tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF-")


def test_pdf_without_a_browser_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if find_browser() is None:
        with pytest.raises(PrinterMissing, match="open the HTML report and print it"):
            write_pdf("<p>", tmp_path / "x.pdf")


def test_the_rubric_speaks_to_those_who_lost_points(tmp_path: Path) -> None:
    hint = "Divide the sum by the count."
    rubric = RUBRIC.replace("title: The mean is right", f"title: The mean is right\n    feedback: {hint}")
    book, assignment = make_book(tmp_path, rubric)
    add_class(book, assignment, 2)  # the first is wrong
    grade_here(book, assignment)
    shown = {one.submission.id: hint in report_html(one, "Sales", "a student") for one in grades(book, assignment)}
    assert shown == {1: True, 2: False}


def test_a_report_names_no_grader_and_not_what_the_machine_gave(book: tuple[Database, Assignment]) -> None:
    page = report_html(_approved(*book)[0], "Sales", "student-1")
    assert "looked at it" in page
    assert "set by ann" not in page
    assert "the machine gave" not in page
