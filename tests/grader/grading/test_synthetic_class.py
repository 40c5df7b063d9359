"""The synthetic class through the whole flow: files in, known points and flags out, no name on the way."""

from pathlib import Path
from typing import Literal

import pytest

from grader.cli.demo import prepare_class
from grader.grading import Grade, GradeSettings, grades
from grader.sandbox import why_unavailable
from grader.store import reveal
from grader.synthetic import SyntheticSubmission, make_class
from tests.support.grade_books import grade_here


def _graded(
    folder: Path, language: Literal["python", "r"], students: int = 12
) -> list[tuple[SyntheticSubmission, Grade]]:
    made = make_class(language, students=students)
    database, assignment = prepare_class(folder, made)
    grade_here(database, assignment)
    found = grades(database, assignment)
    who = reveal(database, [one.submission.id for one in found], "test", "to compare")
    by_key = {who[one.submission.id].key: one for one in found}
    return [(one, by_key[Path(one.file_name).stem]) for one in made.submissions]


@pytest.mark.parametrize("language", ["python", "r"])
def test_points_and_flags_are_the_known_ones(tmp_path: Path, language: Literal["python", "r"]) -> None:
    for known, grade in _graded(tmp_path, language):
        points = {one.item_id: one.points for one in grade.verdicts if one.item_id in known.points}
        assert points == known.points, known.variant
        found = {flag.code for flag in grade.flags}
        assert {code for code in known.flags if code not in _BY_RERUN} <= found, known.variant


_BY_RERUN = {"resource_limit", "rerun_timed_out", "rerun_died", "fails_when_run", "huge_output"}


def test_no_name_is_in_any_grade(tmp_path: Path) -> None:
    for known, grade in _graded(tmp_path, "python"):
        for word in known.student.split():
            assert word not in repr(grade)


@pytest.mark.slow
@pytest.mark.skipif(bool(why_unavailable()), reason=f"needs the sandbox: {why_unavailable()}")
def test_a_rerun_runs_each_file_once(tmp_path: Path) -> None:
    made = make_class("python", students=1)
    database, assignment = prepare_class(tmp_path, made)
    grade_here(database, assignment, GradeSettings(rerun=True))
    before = database.rows("SELECT * FROM reruns")
    assert len(before) == len({made.solution, *(one.data for one in made.submissions)})
    first = grades(database, assignment)[0]
    assert {one.item_id: one.points for one in first.verdicts if one.item_id in made.submissions[0].points} == (
        made.submissions[0].points
    )
