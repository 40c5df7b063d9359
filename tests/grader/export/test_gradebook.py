"""From a platform's table to students, and back into the table: the shapes that Canvas and Moodle write."""

import csv
import io
from pathlib import Path

import pytest

from grader.errors import GraderError
from grader.export import fill_gradebook
from grader.grading import grades, override
from grader.intake import Incoming, owner_of, read_roster, take_in
from grader.store import Assignment, Database, reveal, set_comment
from tests.support.grade_books import grade_here, make_book, work

CANVAS = (
    "\ufeffStudent,ID,SIS User ID,SIS Login ID,Section,Quiz (11),Sales (12),Current Score\r\n"
    ",,,,,Manual Posting,,\r\n"
    "    Points Possible,,,,,5.00,10.00,(read only)\r\n"
    '"Quill, Ada",101,S1,aquill@example.edu,A,4.00,,80\r\n'
    '"Ramble, Bo",102,S2,bramble,A,,7.00,\r\n'
    '"Student, Test",900,,,A,,,\r\n'
)
MOODLE = (
    "Identifier,Full name,Email address,Status,Grade,Maximum Grade,Grade can be changed,"
    "Last modified (submission),Last modified (grade),Feedback comments\n"
    "Participant 101,Ada Quill,ada@example.edu,Submitted for grading - ,,10.00,Yes,Monday,-,\n"
    "Participant 102,Bo Ramble,bo@example.edu,No submission - ,3,10.00,Yes,-,-,kept\n"
)
CASES = [
    (CANVAS, "quillada_LATE_101_5_hw.ipynb", "Quill, Ada"),
    (MOODLE, "Ada Quill_101_assignsubmission_file_/hw.ipynb", "Ada Quill"),
]


def _graded(folder: Path, text: str, path: str) -> tuple[Database, Assignment]:
    database, assignment = make_book(folder)
    roster = read_roster(text)
    files = [Incoming(owner=owner_of(one, roster), file_name="hw.ipynb", content=work()) for one in (path, "x.ipynb")]
    take_in(database, assignment, files)
    grade_here(database, assignment)
    return database, assignment


@pytest.mark.parametrize(("text", "path", "name"), CASES, ids=["canvas", "moodle"])
def test_a_table_of_a_platform_is_a_roster(text: str, path: str, name: str) -> None:
    owner = owner_of(path, read_roster(text))
    assert (owner.identity.name, owner.identity.lms_id) == (name, "101")
    assert owner.identity.key == owner_of(path, {}).identity.key, "the same pseudonym with and without the roster"
    assert owner.late_days == owner_of(path, {}).late_days, "the table does not say how late a file is"
    assert "900" in read_roster(CANVAS)
    assert "" not in read_roster(CANVAS)


def _filled(folder: Path, text: str, path: str, table: str = "", decided: bool = True) -> list[list[str]]:
    database, assignment = _graded(folder, text, path)
    found = grades(database, assignment)
    for one in found:
        for item in ("names", "style") if decided else ():
            override(database, one, item, "0", "ann", "looked at it")
        set_comment(database, one.submission.id, "", "=1+1", "ann")
    identities = reveal(database, [one.submission.id for one in found], "ann", "export")
    done = fill_gradebook(table or text, grades(database, assignment), identities, "sales")
    assert (done.filled, done.missing) == (int(decided), ("x",))
    return list(csv.reader(io.StringIO(done.text)))


def test_a_gradebook_of_canvas_comes_back_with_one_more_grade(tmp_path: Path) -> None:
    before = list(csv.reader(io.StringIO(CANVAS.removeprefix("\ufeff"))))
    after = _filled(tmp_path, CANVAS, CASES[0][1])
    assert after[3][6] == "6"
    after[3][6] = ""
    assert after == before


def test_an_assignment_that_canvas_does_not_have_gets_a_column(tmp_path: Path) -> None:
    after = _filled(tmp_path, CANVAS, CASES[0][1], CANVAS.replace("Sales (12)", "Essay (12)"))
    assert [row[-1] for row in after] == ["sales", "", "10", "6", "", ""]


def test_a_worksheet_of_moodle_comes_back_with_grade_and_comment(tmp_path: Path) -> None:
    after = _filled(tmp_path, MOODLE, CASES[1][1])
    assert after[1][:5] == ["Participant 101", "Ada Quill", "ada@example.edu", "Submitted for grading - ", "6"]
    assert after[1][9] == "'=1+1"
    assert after[2] == next(csv.reader([MOODLE.splitlines()[2]]))


@pytest.mark.parametrize(("text", "path", "name"), CASES, ids=["canvas", "moodle"])
def test_a_grade_with_open_items_is_not_filled_in(tmp_path: Path, text: str, path: str, name: str) -> None:
    before = list(csv.reader(io.StringIO(text.removeprefix("\ufeff"))))
    assert _filled(tmp_path, text, path, decided=False) == before


def test_another_maximum_and_other_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GraderError, match="the platform's table has 50 points, the rubric 10"):
        _filled(tmp_path / "a", CANVAS, CASES[0][1], CANVAS.replace("10.00", "50.00"))
    with pytest.raises(GraderError, match="the platform's table has 50 points"):
        _filled(tmp_path / "b", MOODLE, CASES[1][1], MOODLE.replace("10.00", "50.00"))
    with pytest.raises(GraderError, match="neither a gradebook of Canvas"):
        _filled(tmp_path / "c", MOODLE, CASES[1][1], "a,b\n1,2\n")


def test_two_students_of_one_name_are_matched_by_number_alone(tmp_path: Path) -> None:
    twins = CANVAS.replace("Ramble, Bo", "Quill, Ada")
    after = _filled(tmp_path, twins, CASES[0][1])
    assert (after[3][6], after[4][6]) == ("6", "7.00")
