"""The worker process is killed at random moments: nothing is graded twice, nothing is lost."""

import os
import random
import signal
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path

import pytest

from grader.grading import GradeSettings, grades
from grader.store import Assignment, Database, progress
from grader.worker import Watched, WorkerOptions, queue_all, run_batch, start_worker
from tests.support.grade_books import add_class, known_points, make_book
from tests.support.waiting import until

pytestmark = pytest.mark.slow

_COUNT = 50
_OPTIONS = WorkerOptions(check_threads=2, model_threads=1)


def _finished(book: Database) -> int:
    return len(book.rows("SELECT id FROM journal"))


def _watch(seen: Watched) -> None:
    """The figures of a watched batch are never wrong."""
    assert seen.progress.checks.total == _COUNT
    assert seen.eta_s is None or seen.eta_s >= 0


def _points(book: Database, assignment: Assignment) -> dict[int, Decimal]:
    return {one.submission.id: one.score.total for one in grades(book, assignment)}


def _queued(folder: Path) -> tuple[Database, Assignment]:
    book, assignment = make_book(folder)
    add_class(book, assignment, _COUNT)
    assert queue_all(book, assignment, GradeSettings()) == _COUNT
    return book, assignment


def _state(book: Database) -> str:
    jobs = [dict(row) for row in book.rows("SELECT state, error, count(*) AS jobs FROM jobs GROUP BY state, error")]
    return f"{jobs}\n{book.path.with_name('worker.log').read_text()}"


def _kill_at(book: Database, worker: "subprocess.Popen[bytes]", finished: int) -> bool:
    """Whether it died with work left."""
    while worker.poll() is None and _finished(book) < finished:
        time.sleep(0.001)
    worker.kill()
    worker.wait()
    return _finished(book) < _COUNT


def test_a_batch_of_fifty_survives_kills_at_random_moments(tmp_path: Path) -> None:
    book, assignment = _queued(tmp_path)
    moments = [random.Random().randint(*band) for band in ((1, 6), (12, 17), (23, 28), (34, 39))]
    midway = [_kill_at(book, start_worker(book, _OPTIONS), moment) for moment in moments]
    assert any(midway)  # the fault happened
    state = run_batch(book, assignment, _OPTIONS, _watch)
    assert (state.checks.done, state.checks.failed) == (_COUNT, 0)
    once = book.rows("SELECT submission_id, count(*) AS times FROM journal GROUP BY submission_id")
    assert [row["times"] for row in once] == [1] * _COUNT
    assert _points(book, assignment) == {one: known_points(one) for one in range(1, _COUNT + 1)}


def test_a_worker_that_dies_while_it_is_watched_is_started_again(tmp_path: Path) -> None:
    book, assignment = _queued(tmp_path)
    killed: list[int] = []

    def kill_once(seen: Watched) -> None:
        row = book.row("SELECT pid FROM workers")
        if row and not killed:
            killed.append(row["pid"])
            os.kill(row["pid"], signal.SIGKILL)

    state = run_batch(book, assignment, _OPTIONS, kill_once)
    assert killed
    assert state.checks.done == _COUNT
    assert _finished(book) == _COUNT


def test_graded_work_is_not_graded_again(tmp_path: Path) -> None:
    book, assignment = make_book(tmp_path)
    add_class(book, assignment, 4)
    queue_all(book, assignment, GradeSettings())
    run_batch(book, assignment, _OPTIONS, lambda _: None)
    assert queue_all(book, assignment, GradeSettings()) == 0
    run_batch(book, assignment, _OPTIONS, lambda _: None)
    assert _finished(book) == 4
    assert until(lambda: progress(book, assignment.id).is_over)


def test_a_worker_that_is_told_to_end_hands_its_jobs_back(tmp_path: Path) -> None:
    book, assignment = _queued(tmp_path)
    worker = start_worker(book, _OPTIONS)
    assert until(lambda: _finished(book) > 0, 60)
    worker.terminate()
    assert worker.wait(60) == 0
    state = progress(book, assignment.id)
    assert (state.checks.running, state.checks.done) == (0, _finished(book))
    assert book.rows("SELECT * FROM workers") == []


def test_a_worker_takes_over_the_jobs_of_one_that_was_killed_beside_it(tmp_path: Path) -> None:
    """Two commands grade one book: the one that is left ends the batch."""
    book, assignment = _queued(tmp_path)
    hanging = subprocess.Popen([sys.executable, "-c", _CLAIM_AND_HANG, str(tmp_path)], stdout=subprocess.PIPE)
    assert hanging.stdout
    assert hanging.stdout.readline() == b"claimed\n"
    worker = start_worker(book, _OPTIONS)
    until(lambda: _finished(book) >= _COUNT - 1 or worker.poll() is not None, 120)
    assert _finished(book) == _COUNT - 1, _state(book)
    assert worker.poll() is None, _state(book)  # it waits for the last
    hanging.kill()
    hanging.communicate()
    assert worker.wait(120) == 0
    assert progress(book, assignment.id).checks.done == _COUNT


_CLAIM_AND_HANG = """
import sys, time
from pathlib import Path
from grader.store import Database, WorkerLock, claim
book = Database.open(Path(sys.argv[1]))
worker = WorkerLock(book)
assert claim(book, worker.name, "checks")
print("claimed", flush=True)
time.sleep(600)
"""
