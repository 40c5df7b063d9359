"""The queue in the grade book: jobs are claimed once, finished once, and come back when their worker is gone."""

import multiprocessing
import os
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from grader.store import (
    Database,
    GradeBookError,
    StudentIdentity,
    WorkerLock,
    add_submission,
    claim,
    enqueue,
    fail,
    finish,
    last_settings,
    live_workers,
    postpone,
    progress,
    recover,
    save_assignment,
    settings_of_batches,
)


@pytest.fixture
def book(tmp_path: Path) -> Database:
    return Database.create(tmp_path)


@pytest.fixture
def worker(book: Database) -> Iterator[WorkerLock]:
    with WorkerLock(book) as worker:
        yield worker


def _queued(book: Database, count: int = 3) -> int:
    assignment = save_assignment(book, "hw1", "{}")
    ids = [
        add_submission(book, assignment.id, StudentIdentity(key=f"s{n}"), "x.ipynb", b"%d" % n).id for n in range(count)
    ]
    assert enqueue(book, ids, "k", assignment.rubric.id, "{}") == count
    return assignment.id


def test_a_job_is_claimed_and_finished_once(book: Database, worker: WorkerLock) -> None:
    assignment = _queued(book, 2)
    first, second = claim(book, worker.name, "checks"), claim(book, worker.name, "checks")
    assert first
    assert second
    assert first.submission_id != second.submission_id
    assert claim(book, worker.name, "checks") is None
    with book.transaction() as connection:
        assert finish(connection, first, worker.name)
        assert not finish(connection, first, worker.name)  # a second time stores nothing
    fail(book, second, worker.name, "broken")
    found = progress(book, assignment)
    assert (found.checks.done, found.checks.failed, found.is_over) == (1, 1, True)
    assert found.failures[0][1] == "broken"
    assert len(book.rows("SELECT * FROM journal")) == 1


def test_finished_jobs_are_not_queued_again_and_failed_ones_are(book: Database, worker: WorkerLock) -> None:
    _queued(book, 2)
    for ending in ("finish", "fail"):
        job = claim(book, worker.name, "checks")
        assert job
        if ending == "fail":
            fail(book, job, worker.name, "broken")
        else:
            with book.transaction() as connection:
                finish(connection, job, worker.name)
    version = book.row("SELECT id FROM rubric_versions")
    assert version
    assert enqueue(book, [1, 2], "k", version["id"], "{}") == 1


def test_a_postponed_job_waits_and_does_not_count_as_an_attempt(book: Database, worker: WorkerLock) -> None:
    assignment = _queued(book, 1)
    for _ in range(5):
        job = claim(book, worker.name, "checks")
        assert job
        assert job.attempts == 1
        postpone(book, job, worker.name, -1.0, "the models are away")
    assert progress(book, assignment).waiting_reason == "the models are away"
    job = claim(book, worker.name, "checks")
    assert job
    postpone(book, job, worker.name, 60.0, "away")
    assert claim(book, worker.name, "checks") is None


def _claim_and_hang(folder: str) -> None:
    book = Database.open(Path(folder))
    worker = WorkerLock(book)
    assert claim(book, worker.name, "checks")
    os.kill(os.getpid(), signal.SIGKILL)


def test_jobs_of_a_killed_worker_come_back_but_not_for_ever(book: Database) -> None:
    assignment = _queued(book, 1)
    for round_number in range(1, 4):
        child = multiprocessing.get_context("spawn").Process(target=_claim_and_hang, args=(str(book.path.parent),))
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        assert progress(book, assignment).checks.running == 1  # the fault happened
        assert live_workers(book) == []
        assert recover(book) == 1, round_number
    with WorkerLock(book) as worker:
        assert claim(book, worker.name, "checks") is None
    assert "ended 3 times" in progress(book, assignment).failures[0][1]


def test_a_living_worker_keeps_its_jobs(book: Database) -> None:
    _queued(book, 1)
    with WorkerLock(book) as worker:
        assert claim(book, worker.name, "checks")
        assert live_workers(book) == [os.getpid()]
        assert recover(book) == 0
    with WorkerLock(book) as other:
        assert claim(book, other.name, "checks")


def test_the_file_is_private_and_a_missing_one_says_what_to_do(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        book = Database.create(tmp_path / "course")
        save_assignment(book, "hw1", "{}")
    finally:
        os.umask(old)
    for path in (tmp_path / "course").iterdir():
        assert not path.stat().st_mode & 0o077, path
    with pytest.raises(GradeBookError, match="disagg-grade init"):
        Database.open(tmp_path)
    (tmp_path / "gradebook.sqlite").write_text("no database at all")
    with pytest.raises(GradeBookError, match="not a grade book"):
        Database.open(tmp_path)


def test_a_notebook_that_kills_workers_takes_no_other_with_it(book: Database) -> None:
    """Two ran when the worker died: each is tried again alone, after all others."""
    _queued(book, 3)
    with WorkerLock(book) as gone:
        first, second = claim(book, gone.name, "checks"), claim(book, gone.name, "checks")
        assert first
        assert second
    with WorkerLock(book) as worker:  # both came back when the other ended
        third = claim(book, worker.name, "checks")
        assert third
        assert third.submission_id not in (first.submission_id, second.submission_id)
        assert claim(book, worker.name, "checks") is None  # another one runs
        with book.transaction() as connection:
            finish(connection, third, worker.name)
        suspect = claim(book, worker.name, "checks")
        assert suspect
        assert suspect.submission_id == first.submission_id
        assert claim(book, worker.name, "checks") is None
        fail(book, suspect, worker.name, "broken")
        assert claim(book, worker.name, "checks")


def test_a_full_disk_leaves_the_grade_book_usable(book: Database) -> None:
    assignment = save_assignment(book, "hw1", "{}")
    pages = book.connection.execute("PRAGMA page_count").fetchone()[0]
    book.connection.execute(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        add_submission(book, assignment.id, StudentIdentity(key="big"), "x.ipynb", bytes(1 << 20))
    book.connection.execute("PRAGMA max_page_count = 1000000")
    add_submission(book, assignment.id, StudentIdentity(key="big"), "x.ipynb", bytes(1 << 20))
    assert len(book.rows("SELECT * FROM submissions")) == 1


def test_settings_of_batches_newest_first(book: Database) -> None:
    """Each once: a page looks for the last batch that asked models."""
    assignment = _queued(book, 2)
    version = save_assignment(book, "hw1", "{}").rubric.id
    for key, settings in (("m", '{"models":1}'), ("r", '{"rerun":true}'), ("x", "{}")):
        enqueue(book, [1], key, version, settings)
    assert settings_of_batches(book, assignment) == ["{}", '{"rerun":true}', '{"models":1}']
    assert last_settings(book, assignment) == "{}"
