"""A changed rubric touches only its items; a human's points win and are never lost."""

from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from grader.grading import (
    DecisionRefused,
    Grade,
    GradeSettings,
    approve_all,
    approve_grade,
    changes_since,
    grade_of,
    grades,
    override,
)
from grader.models import Feedback, Improvement, ItemReading, ModelsResult, Reflection, Strength
from grader.models.code_analysis import model_verdicts
from grader.rubric import dump_rubric, load_rubric
from grader.sandbox import why_unavailable
from grader.store import Assignment, Database, StudentIdentity, add_submission, put_models, save_rubric
from tests.support.grade_books import RUBRIC, grade_here, graded_book, known_points, make_book, work

_WORDS = Feedback(
    strengths=(), improvements=(), reflection=Reflection("none", ""), overall="good", instructor_comment=""
)


@pytest.fixture
def book(tmp_path: Path) -> tuple[Database, Assignment]:
    return graded_book(tmp_path)


def _by_id(database: Database, assignment: Assignment) -> dict[int, Grade]:
    return {one.submission.id: one for one in grades(database, assignment)}


def _changed(database: Database, old: str, new: str) -> Assignment:
    assert old in RUBRIC
    assignment = save_rubric(database, "sales", dump_rubric(load_rubric(RUBRIC.replace(old, new))))
    grade_here(database, assignment)
    return assignment


def test_points_equal_the_known_ones(book: tuple[Database, Assignment]) -> None:
    assert {one: grade.score.total for one, grade in _by_id(*book).items()} == {
        one: known_points(one) for one in range(1, 5)
    }


def test_a_human_wins_over_every_regrade(book: tuple[Database, Assignment]) -> None:
    database, assignment = book
    override(database, _by_id(*book)[1], "mean", "3", "ann", "a rounding error")
    assert _by_id(*book)[1].score.total == 5
    assert _by_id(*book)[1].machine.total == 2  # the machine's score stays visible
    assignment = _changed(database, "points: 4\n    check: {kind: output", "points: 2\n    check: {kind: output")
    after = _by_id(database, assignment)
    assert after[1].score.total == 5  # 3 of 2: what the human gave, although the item is worth less now
    assert after[2].score.total == 4
    assert "set by ann: a rounding error" in next(one.reason for one in after[1].verdicts if one.item_id == "mean")


def test_a_regrade_shows_what_changed_and_why(book: tuple[Database, Assignment]) -> None:
    database, _ = book
    assignment = _changed(database, "names: [sales]", "names: [sales, regions]")
    changes = changes_since(database, assignment)
    assert len(changes) == 4
    assert {item.item_id for change in changes for item in change.items} == {"data"}
    assert "regions" in changes[0].items[0].reason


def test_a_changed_title_changes_no_grade(book: tuple[Database, Assignment]) -> None:
    assignment = _changed(book[0], "title: Clear names", "title: Names that are clear")
    assert changes_since(book[0], assignment) == []


def test_decisions_that_do_not_fit_are_refused(book: tuple[Database, Assignment]) -> None:
    grade = _by_id(*book)[1]
    with pytest.raises(DecisionRefused, match="no item maen; it has data, mean"):
        override(book[0], grade, "maen", "1", "ann", "why")
    with pytest.raises(DecisionRefused, match="takes 0 to 4 points, not 5"):
        override(book[0], grade, "mean", "5", "ann", "why")
    with pytest.raises(DecisionRefused, match="must be a number"):
        override(book[0], grade, "mean", "all", "ann", "why")
    with pytest.raises(DecisionRefused, match="open items: names, style"):
        approve_grade(book[0], grade, "ann")


def test_approve_all_leaves_what_needs_a_look(book: tuple[Database, Assignment]) -> None:
    database, assignment = book
    add_submission(database, assignment.id, StudentIdentity(key="broken"), "x.ipynb", b"no notebook")
    grade_here(database, assignment)
    for one in (1, 2):
        for item in ("names", "style"):
            override(database, _by_id(*book)[one], item, "2", "ann", "fine")
    done = approve_all(database, grades(*book), "ann")
    assert (done.approved, done.left_open) == (2, 3)


def _approved_by_hand(book: tuple[Database, Assignment], one: int = 2) -> None:
    for item in ("names", "style"):
        override(book[0], _by_id(*book)[one], item, "2", "ann", "fine")
    approve_grade(book[0], _by_id(*book)[one], "ann")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("points: 2, check: {kind: variables, names: [sales]}", "points: 3, check: {kind: variables, names: [sales]}"),
        ("title: Clear names", "title: Names that are clear"),
        ("names: [sales]", "names: [mean_sales]"),
    ],
    ids=["points", "title", "evidence"],
)
def test_a_regrade_that_keeps_the_total_takes_the_approval_back(
    book: tuple[Database, Assignment], old: str, new: str
) -> None:
    database, _ = book
    _approved_by_hand(book)
    assert _by_id(*book)[2].approved
    moved = RUBRIC.replace("points: 4\n", "points: 3\n") if "points: 3" in new else RUBRIC
    assignment = save_rubric(database, "sales", dump_rubric(load_rubric(moved.replace(old, new))))
    grade_here(database, assignment)
    after = _by_id(database, assignment)[2]
    assert (after.score.total, after.state) == (Decimal(10), "changed since approval")
    assert [one.layer for one in after.verdicts] == ["structure", "outputs", "human", "human"]
    assert [
        one.unapproved for one in changes_since(database, assignment) if one.pseudonym == after.submission.pseudonym
    ]
    back = save_rubric(database, "sales", dump_rubric(load_rubric(RUBRIC)))
    grade_here(database, back)
    assert _by_id(database, back)[2].approved  # the very same grade again


def test_feedback_that_comes_after_an_approval_is_not_approved(book: tuple[Database, Assignment]) -> None:
    _approved_by_hand(book)
    grade = _by_id(*book)[2]
    said = ModelsResult(verdicts=(), readings={}, questions={}, feedback=_WORDS, runs=(), wall_s=0, sequential_s=0)
    with book[0].transaction() as connection:
        put_models(connection, 2, grade.submission.current_key or "", msgspec.json.encode(said).decode())
    after = _by_id(*book)[2]
    assert (after.score, after.state) == (grade.score, "changed since approval")


def _judged(
    book: tuple[Database, Assignment], answer: Literal["yes", "no"], unfounded: tuple[str, ...] = (), **words: Any
) -> Grade:
    """Of submission 2, after the code model answered about `names` and the feedback model spoke."""
    rubric = load_rubric(RUBRIC)
    items = [item for item in rubric.items if item.id == "names"]
    readings: dict[str, tuple[ItemReading, ...]] = {
        "names": (ItemReading(item_id="names", answer=answer, reason="so it is"),)
    }
    said = ModelsResult(
        verdicts=model_verdicts(rubric, items, readings),
        readings=readings,
        questions={},
        feedback=msgspec.structs.replace(_WORDS, **words),
        runs=(),
        unfounded=unfounded,
        wall_s=0,
        sequential_s=0,
    )
    key = _by_id(*book)[2].submission.current_key or ""
    with book[0].transaction() as connection:
        put_models(connection, 2, key, msgspec.json.encode(said).decode())
    return _by_id(*book)[2]


def _names(grade: Grade) -> tuple[str, Decimal | int, Decimal | int]:
    found = next(one for one in grade.verdicts if one.item_id == "names")
    return found.status, found.points, found.pending


def _contradictions(grade: Grade) -> list[str]:
    return [flag.message for flag in grade.flags if flag.code == "feedback_contradicts"]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("yes", {"improvements": (Improvement("names", "a", "b", "c", "d"),)}),
        ("no", {"strengths": (Strength("names", "Clear."),)}),
    ],
)
def test_models_that_disagree_decide_nothing(
    book: tuple[Database, Assignment], answer: Literal["yes", "no"], words: dict[str, Any]
) -> None:
    agreed = _judged(book, answer)
    assert _names(agreed) == (("earned", 2, 0) if answer == "yes" else ("not_earned", 0, 0))
    disputed = _judged(book, answer, **words)
    assert _names(disputed) == ("needs_review", 0, 2)
    assert disputed.score.total == 6
    assert _contradictions(disputed) == ["the feedback model and the code model disagree about names"]
    override(book[0], disputed, "names", "1", "ann", "some are clear")
    assert _names(_by_id(*book)[2]) == ("partial", 1, 0)
    assert _contradictions(_by_id(*book)[2]) == []


def test_feedback_moves_no_points_of_the_checks(book: tuple[Database, Assignment]) -> None:
    lost = ("the feedback speaks of cell 9; the work has 4",)
    grade = _judged(book, "yes", lost, improvements=(Improvement("mean", "a", "b", "c", "d"),))
    assert grade.score.total == 8
    assert _contradictions(grade) == [
        "the feedback criticises mean, which earned all its points",
        "the feedback speaks of cell 9; the work has 4",
    ]


def test_late_work_loses_what_the_policy_says(tmp_path: Path) -> None:
    database, assignment = make_book(tmp_path, RUBRIC + "late: {per_day_percent: 10, max_percent: 50}\n")
    for days in (0.0, 1.5, 30.0):
        identity = StudentIdentity(key=f"late{days}")
        add_submission(database, assignment.id, identity, "x.ipynb", work(words=f"{days}"), late_days=days)
    grade_here(database, assignment)
    found = _by_id(database, assignment)
    assert [found[one].score.total for one in (1, 2, 3)] == [6, 4, 1]  # of 6: 0, 2 and at most 5 points of 10
    assert found[2].score.components[-1].reason.startswith("2 days late")
    assert found[1].score.components[-1].id == "style"
    softer = RUBRIC + "late: {per_day_percent: 5}\n"
    changed = save_rubric(database, "sales", dump_rubric(load_rubric(softer)))
    grade_here(database, changed)
    assert _by_id(database, changed)[2].score.total == 5


def test_identical_files_are_both_graded_and_both_flagged(book: tuple[Database, Assignment]) -> None:
    database, assignment = book
    for key in ("first", "second"):
        add_submission(database, assignment.id, StudentIdentity(key=key), "x.ipynb", work(words="the same"))
    grade_here(database, assignment)
    flagged = [one for one in grades(*book) if any(flag.code == "identical" for flag in one.flags)]
    assert len(flagged) == 2
    assert {one.score.total for one in flagged} == {Decimal(6)}


def test_components_sum_to_the_total(book: tuple[Database, Assignment]) -> None:
    override(book[0], _by_id(*book)[1], "style", "1.37", "ann", "odd points")
    for grade in grades(*book):
        assert sum(one.points for one in grade.score.components) == grade.score.total


def test_ungraded_work_has_no_grade(book: tuple[Database, Assignment]) -> None:
    new = add_submission(book[0], book[1].id, StudentIdentity(key="new"), "x.ipynb", work(words="new"))
    assert grade_of(book[0], new) is None


@pytest.mark.slow
@pytest.mark.skipif(bool(why_unavailable()), reason=f"no sandbox: {why_unavailable()}")
def test_a_changed_tolerance_runs_no_student_code_again(tmp_path: Path) -> None:
    """What is compared changes no run; what is run does."""
    database, assignment = make_book(tmp_path)
    add_submission(database, assignment.id, StudentIdentity(key="one"), "one.ipynb", work(mean=21))
    grade_here(database, assignment, GradeSettings(rerun=True))
    assert grades(database, assignment)[0].score.total == 6, "the cell prints 20 when it runs"
    runs = database.rows("SELECT * FROM reruns")
    assert len(runs) == 2, "the work and the solution"
    for changed in ("compare: number, rel_tol: 0.2", "compare: text"):
        text = RUBRIC.replace("compare: number", changed)
        assignment = save_rubric(database, "sales", dump_rubric(load_rubric(text)))
        grade_here(database, assignment, GradeSettings(rerun=True))
        assert [tuple(row) for row in database.rows("SELECT * FROM reruns")] == [tuple(row) for row in runs]
    assignment = save_rubric(database, "sales", dump_rubric(load_rubric(RUBRIC + "limits: {cell_timeout_s: 30}\n")))
    grade_here(database, assignment, GradeSettings(rerun=True))
    assert len(database.rows("SELECT * FROM reruns")) == 4
