"""The queue of the worker processes. Its state is in the grade book: a worker may be killed at any moment.

A worker holds a lock on a file of its own. The system frees the lock when the process ends, in whatever way; then its
jobs go back into the queue.
"""

import fcntl
import os
import sqlite3
import time
import uuid
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import IO, Literal

import msgspec

from grader.store.database import Database

Stage = Literal["checks", "models"]
MAX_ATTEMPTS = 3  # a job whose worker died so often is not tried again


class GradingJob(msgspec.Struct, frozen=True, kw_only=True):
    submission_id: int
    key: str
    stage: Stage
    rubric_version_id: int
    settings: str
    attempts: int
    started_at: float


class WorkerLock(AbstractContextManager["WorkerLock"]):
    """The sign of life of this process."""

    def __init__(self, database: Database) -> None:
        self.name = uuid.uuid4().hex[:12]
        self._database, self._path = database, _lock_path(database, self.name)
        self._file: IO[bytes] = open(self._path, "wb", opener=_private)  # noqa: SIM115  held until the process ends
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with database.transaction() as connection:
            connection.execute("INSERT INTO workers VALUES (?, ?, ?, ?)", (self.name, os.getpid(), "", time.time()))

    def __exit__(self, *_: object) -> None:
        _forget(self._database, self.name)
        self._path.unlink(missing_ok=True)
        self._file.close()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _lock_path(database: Database, worker: str) -> Path:
    return database.path.with_name(f"{database.path.name}.worker-{worker}")


def recover(database: Database) -> int:
    """Jobs of workers that are gone wait again. How many there were."""
    return sum(
        _forget(database, row["name"])
        for row in database.rows("SELECT name FROM workers")
        if _is_gone(_lock_path(database, row["name"]))
    )


def _is_gone(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False
    path.unlink(missing_ok=True)
    return True


def _forget(database: Database, worker: str) -> int:
    with database.transaction() as connection:
        left = connection.execute(
            "UPDATE jobs SET state = 'waiting', worker = NULL WHERE worker = ? AND state = 'running'", (worker,)
        ).rowcount
        connection.execute("DELETE FROM workers WHERE name = ?", (worker,))
    return left


def live_workers(database: Database) -> list[int]:
    """Process ids."""
    rows = database.rows("SELECT name, pid FROM workers")
    return [row["pid"] for row in rows if not _is_gone(_lock_path(database, row["name"]))]


def enqueue(database: Database, submission_ids: list[int], key: str, rubric_version_id: int, settings: str) -> int:
    """How many jobs are new. A finished one is not graded again; a failed one is."""
    added = 0
    with database.transaction() as connection:
        for submission_id in submission_ids:
            added += connection.execute(
                "INSERT INTO jobs (submission_id, key, stage, rubric_version_id, settings, queued_at)"
                " VALUES (?, ?, 'checks', ?, ?, ?) ON CONFLICT DO NOTHING",
                (submission_id, key, rubric_version_id, settings, time.time()),
            ).rowcount
            added += connection.execute(
                "UPDATE jobs SET state = 'waiting', attempts = 0, not_before = 0, error = ''"
                " WHERE submission_id = ? AND key = ? AND state = 'failed'",
                (submission_id, key),
            ).rowcount
            connection.execute("UPDATE submissions SET current_key = ? WHERE id = ?", (key, submission_id))
    return added


def settings_of_batches(database: Database, assignment_id: int) -> list[str]:
    """Of this assignment's batches, newest first."""
    rows = database.rows(
        "SELECT settings FROM jobs JOIN submissions ON submissions.id = submission_id WHERE assignment_id = ?"
        " GROUP BY settings ORDER BY max(queued_at) DESC",
        (assignment_id,),
    )
    return [row["settings"] for row in rows]


def last_settings(database: Database, assignment_id: int) -> str | None:
    """Of the newest batch of this assignment."""
    return next(iter(settings_of_batches(database, assignment_id)), None)


def queued_at(database: Database, assignment_id: int) -> float | None:
    """When the newest batch of this assignment was asked for."""
    row = database.row(
        "SELECT max(queued_at) AS at FROM jobs JOIN submissions ON submissions.id = submission_id"
        " WHERE assignment_id = ? AND stage = 'checks'",
        (assignment_id,),
    )
    return row["at"] if row else None


def claim(database: Database, worker: str, stage: Stage) -> GradingJob | None:
    """The next waiting job, which now belongs to this worker. Checks in which a worker died come last, and alone: which
    of several notebooks killed it is not known, and no other shall fail for it."""
    with database.transaction() as connection:
        row = connection.execute(
            "SELECT rowid, * FROM jobs WHERE state = 'waiting' AND stage = ? AND not_before <= ?"
            " ORDER BY stage = 'checks' AND attempts > 0, queued_at, submission_id LIMIT 1",
            (stage, time.time()),
        ).fetchone()
        if row is None or (stage == "checks" and not _has_room(connection, row["attempts"] > 0)):
            return None
        if row["attempts"] >= MAX_ATTEMPTS:
            _give_up(connection, row)
            return None
        connection.execute(
            "UPDATE jobs SET state = 'running', worker = ?, attempts = attempts + 1, started_at = ? WHERE rowid = ?",
            (worker, time.time(), row["rowid"]),
        )
        return _job(row)


def _has_room(connection: sqlite3.Connection, is_suspect: bool) -> bool:
    running = connection.execute("SELECT attempts FROM jobs WHERE state = 'running' AND stage = 'checks'").fetchall()
    return not running if is_suspect else all(row["attempts"] < 2 for row in running)


def _give_up(connection: sqlite3.Connection, row: sqlite3.Row) -> None:
    error = row["error"] or f"the worker process ended {row['attempts']} times while it graded this notebook"
    connection.execute("UPDATE jobs SET state = 'failed', error = ? WHERE rowid = ?", (error, row["rowid"]))


def _job(row: sqlite3.Row) -> GradingJob:
    return GradingJob(
        submission_id=row["submission_id"],
        key=row["key"],
        stage=row["stage"],
        rubric_version_id=row["rubric_version_id"],
        settings=row["settings"],
        attempts=row["attempts"] + 1,
        started_at=time.time(),
    )


_THIS = " WHERE submission_id = ? AND key = ? AND stage = ? AND worker = ? AND state = 'running'"


def _named(job: GradingJob, worker: str) -> tuple[int, str, str, str]:
    return job.submission_id, job.key, job.stage, worker


def finish(connection: sqlite3.Connection, job: GradingJob, worker: str) -> bool:
    """Within the transaction that stores the result. False: the job belongs to another worker now; store nothing."""
    now = time.time()
    done = connection.execute(
        "UPDATE jobs SET state = 'done', error = '', ended_at = ?" + _THIS, (now, *_named(job, worker))
    ).rowcount
    if done:
        connection.execute(
            "INSERT INTO journal (submission_id, key, stage, worker, seconds, at) VALUES (?, ?, ?, ?, ?, ?)",
            (job.submission_id, job.key, job.stage, worker, now - job.started_at, now),
        )
    return bool(done)


def follow_up(connection: sqlite3.Connection, job: GradingJob) -> None:
    """The models' stage, after the checks."""
    connection.execute(
        "INSERT INTO jobs (submission_id, key, stage, rubric_version_id, settings, queued_at)"
        " VALUES (?, ?, 'models', ?, ?, ?) ON CONFLICT DO NOTHING",
        (job.submission_id, job.key, job.rubric_version_id, job.settings, time.time()),
    )


def postpone(database: Database, job: GradingJob, worker: str, delay_s: float, error: str) -> None:
    """The reason is outside the job: this was no attempt."""
    with database.transaction() as connection:
        connection.execute(
            "UPDATE jobs SET state = 'waiting', worker = NULL, attempts = attempts - 1, not_before = ?, error = ?"
            + _THIS,
            (time.time() + delay_s, error, *_named(job, worker)),
        )


def fail(database: Database, job: GradingJob, worker: str, error: str) -> None:
    with database.transaction() as connection:
        connection.execute(
            "UPDATE jobs SET state = 'failed', error = ?, ended_at = ?" + _THIS,
            (error, time.time(), *_named(job, worker)),
        )


def hand_back(database: Database, worker: str) -> None:
    """On a planned end: jobs that were not finished wait again, without an attempt."""
    with suppress(sqlite3.OperationalError), database.transaction() as connection:
        connection.execute(
            "UPDATE jobs SET state = 'waiting', worker = NULL, attempts = attempts - 1"
            " WHERE worker = ? AND state = 'running'",
            (worker,),
        )
