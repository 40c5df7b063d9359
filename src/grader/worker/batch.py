"""A batch from the outside: put submissions into the queue, run a worker process, watch it, start it again.

A command or a page that watches may end at any time; the worker goes on. A worker that ends may be started again; the
grade book has the state.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from grader.errors import GraderError
from grader.grading import GradeSettings, grading_key
from grader.store import (
    Assignment,
    BatchProgress,
    Database,
    enqueue,
    finished_since,
    live_workers,
    progress,
    submissions,
)
from grader.worker.timeouts import WorkerTimeouts
from grader.worker.worker import MODELS_AWAY, UNWRITABLE, WorkerOptions

_starting = threading.Lock()
_started: dict[Path, "subprocess.Popen[bytes]"] = {}  # of this process, the last one of each grade book
_RESTARTS = 5  # without any job finished in between


class WorkerFailed(GraderError):
    """The worker process ends again and again."""


class Watched(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a batch. `eta_s`: None while nothing is known."""

    progress: BatchProgress
    eta_s: float | None
    elapsed_s: float


def queue_all(database: Database, assignment: Assignment, settings: GradeSettings) -> int:
    """All submissions of the assignment. How many are new; what is done already is not done again."""
    return queue_some(database, assignment, settings, [one.id for one in submissions(database, assignment.id)])


def queue_some(database: Database, assignment: Assignment, settings: GradeSettings, ids: list[int]) -> int:
    """These submissions alone."""
    text = msgspec.json.encode(settings).decode()
    return enqueue(database, ids, grading_key(assignment, settings), assignment.rubric.id, text)


def start_worker(database: Database, options: WorkerOptions) -> "subprocess.Popen[bytes]":
    """In a session of its own: Ctrl-C in the watching command does not reach it."""
    command = [sys.executable, "-m", "grader.worker", str(database.path.parent), msgspec.json.encode(options).decode()]
    log = open(database.path.with_name("worker.log"), "ab", opener=_private)  # noqa: SIM115  the worker's own
    with log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def ensure_worker(database: Database, options: WorkerOptions) -> None:
    """For a page: starts a worker unless one runs, or is about to: of two clicks one starts it."""
    with _starting:
        last = _started.get(database.path)
        if not live_workers(database) and (last is None or last.poll() is not None):
            _started[database.path] = start_worker(database, options)


def run_batch(
    database: Database,
    assignment: Assignment,
    options: WorkerOptions,
    look: Callable[[Watched], None],
    timeouts: WorkerTimeouts = WorkerTimeouts(),
) -> BatchProgress:
    """Until the batch is over, or the models stay away. Ctrl-C ends the worker too; unfinished jobs wait again."""
    began_at, started = time.time(), time.monotonic()
    worker, restarts = start_worker(database, options), _Restarts(database)
    try:
        while True:
            state = progress(database, assignment.id)
            look(watched(database, state, began_at, time.monotonic() - started))
            if state.is_over and worker.poll() is not None:
                return state
            if (code := worker.poll()) is not None:
                if code == MODELS_AWAY:
                    return state
                restarts.count(code)
                time.sleep(timeouts.restart_s)
                worker = start_worker(database, options)
            time.sleep(timeouts.poll_s)
    finally:
        if worker.poll() is None:
            worker.terminate()
            worker.wait()


class _Restarts:
    """Counts the ends of workers that finished nothing."""

    def __init__(self, database: Database) -> None:
        self._database, self._fruitless, self._since = database, 0, time.time()

    def count(self, code: int) -> None:
        done = sum(finished_since(self._database, self._since, stage) for stage in ("checks", "models"))
        self._fruitless, self._since = (0 if done else self._fruitless + 1), time.time()
        if self._fruitless > _RESTARTS:
            log = self._database.path.with_name("worker.log")
            why = "the grade book cannot be written: is the disk full? " if code == UNWRITABLE else ""
            raise WorkerFailed(f"{why}the worker process ended {self._fruitless} times without a result; see {log}")


def watched(database: Database, state: BatchProgress, began_at: float, elapsed_s: float) -> Watched:
    left = {"checks": state.checks.left, "models": state.models.left + (state.checks.left if state.models.total else 0)}
    etas = [_eta(left[stage], finished_since(database, began_at, stage), elapsed_s) for stage in ("checks", "models")]
    known = [eta for eta in etas if eta is not None]
    return Watched(progress=state, eta_s=max(known) if len(known) == len(etas) else None, elapsed_s=elapsed_s)


def _eta(left: int, done: int, elapsed_s: float) -> float | None:
    if not left:
        return 0.0
    return left * elapsed_s / done if done else None
