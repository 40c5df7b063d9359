"""Decisions of people: they win, they stay, they can be taken back, and each has who, when and why."""

from decimal import Decimal
from pathlib import Path

import pytest

from grader.store import (
    Database,
    GradeBookError,
    StudentIdentity,
    add_submission,
    approve,
    comment_bank,
    history,
    keep_comment,
    names_of,
    reopen,
    reveal,
    reveals,
    review_of,
    save_assignment,
    save_rubric,
    set_comment,
    set_points,
    submissions,
    undo,
)


@pytest.fixture
def book(tmp_path: Path) -> Database:
    return Database.create(tmp_path)


@pytest.fixture
def one(book: Database) -> int:
    assignment = save_assignment(book, "hw1", "{}")
    identity = StudentIdentity(key="doe", name="Jane Doe", email="jane@example.edu", lms_id="77")
    return add_submission(book, assignment.id, identity, "doejane_77_hw1.ipynb", b"{}").id


def test_the_last_points_count_and_undo_brings_the_earlier_ones_back(book: Database, one: int) -> None:
    set_points(book, one, "mean", "3", "ann", "right idea")
    set_points(book, one, "mean", "4.5", "ann", "and it runs")
    assert review_of(book, one).points["mean"].points == Decimal("4.5")
    assert undo(book, one, "bob").after == "4.5"
    assert review_of(book, one).points["mean"].points == Decimal(3)
    undo(book, one, "bob")
    assert review_of(book, one).points == {}
    with pytest.raises(GradeBookError, match="nothing to undo"):
        undo(book, one, "bob")
    told = [(change.action, change.who, change.undone) for change in history(book, one)]
    assert told == [("points", "ann", True), ("points", "ann", True), ("undo", "bob", False), ("undo", "bob", False)]


def test_an_override_needs_a_reason_and_a_number(book: Database, one: int) -> None:
    with pytest.raises(GradeBookError, match="needs a reason"):
        set_points(book, one, "mean", "3", "ann", " ")
    for wrong in ("full", "NaN", "Infinity"):
        with pytest.raises(GradeBookError, match="must be a number"):
            set_points(book, one, "mean", wrong, "ann", "why")


def test_decisions_outlive_rubric_versions(book: Database, one: int) -> None:
    set_points(book, one, "mean", "3", "ann", "right idea")
    assert save_rubric(book, "hw1", '{"new": 1}').rubric.number == 2
    assert save_rubric(book, "hw1", '{"new": 1}').rubric.number == 2  # the same again
    assert review_of(book, one).points["mean"].why == "right idea"


def test_approval_is_of_a_content_and_can_be_taken_away(book: Database, one: int) -> None:
    approve(book, one, Decimal("12.50"), "abc", "ann")
    approval = review_of(book, one).approval
    assert approval
    assert (approval.total, approval.content) == (Decimal("12.5"), "abc")
    reopen(book, one, "ann", "a question of the student")
    assert review_of(book, one).approval is None
    undo(book, one, "ann")
    assert review_of(book, one).approval


def test_comments_and_the_bank(book: Database, one: int) -> None:
    set_comment(book, one, "", "Well done.", "ann")
    set_comment(book, one, "mean", "See week 3.", "ann")
    keep_comment(book, 1, "mean", "See week 3.", "ann")
    keep_comment(book, 1, "mean", "See week 3.", "bob")
    assert review_of(book, one).comments == {"": "Well done.", "mean": "See week 3."}
    assert comment_bank(book, 1) == [("mean", "See week 3.")]
    set_comment(book, one, "mean", "", "ann")
    assert "mean" not in review_of(book, one).comments


def test_names_are_shown_only_by_a_logged_reveal(book: Database, one: int) -> None:
    found = submissions(book, 1)[0]
    assert found.pseudonym.startswith("student-")
    assert "doe" not in repr(found).lower()
    assert reveal(book, [one], "ann", "export")[one].name == "Jane Doe"
    assert [(row.who, row.what, row.why) for row in reveals(book)] == [("ann", [one], "export")]
    with pytest.raises(GradeBookError, match="reason"):
        reveal(book, [one], "ann", "")
    assert {"Jane Doe", "Doe Jane", "doe", "jane@example.edu", "77"} == set(names_of(book, one))


def test_a_newer_file_replaces_the_older_and_equal_files_of_two_students_stay(book: Database, one: int) -> None:
    add_submission(book, 1, StudentIdentity(key="doe"), "second.ipynb", b"[]")
    add_submission(book, 1, StudentIdentity(key="roe"), "same.ipynb", b"[]")
    shas = [row.blob_sha for row in submissions(book, 1)]
    assert len(shas) == 2
    assert len(set(shas)) == 1
    assert len(book.rows("SELECT * FROM submissions")) == 3  # nothing is lost
