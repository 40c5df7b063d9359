"""The worker process: threads that take jobs from the grade book until none is left.

Every result is stored in one transaction with the end of its job. A worker that is killed loses only what it was
computing; the next one computes that again.
"""

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from disaggregated_inference.errors import DisaggError
from disaggregated_inference.struct_types import build_struct_types
from grader.errors import GraderError
from grader.grading import parse_rubric
from grader.models import ModelsUnavailable
from grader.sandbox import longest_run_s
from grader.store import (
    Database,
    GradingJob,
    Stage,
    WorkerLock,
    claim,
    fail,
    hand_back,
    postpone,
    recover,
    rubric_version,
)
from grader.worker.stages import Endpoints, run_checks, run_models
from grader.worker.timeouts import WorkerTimeouts

log = logging.getLogger(__name__)

MODELS_AWAY = 75  # exit code: checks are done, jobs wait for the models (sysexits: try again later)
UNWRITABLE = 74  # exit code: the grade book cannot be written (sysexits: an error of input or output)
_STUCK = 70


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`patience_s`: how long to wait for models that are away."""

    check_threads: int = 2
    model_threads: int = 4
    patience_s: float = 600.0
    timeouts: WorkerTimeouts = WorkerTimeouts()


class Worker:
    def __init__(self, folder: Path, options: WorkerOptions) -> None:
        self._database = Database.open(folder)
        self._options, self._timeouts = options, options.timeouts
        self._endpoints = Endpoints()
        self._stop = threading.Event()
        self._busy: dict[int, tuple[GradingJob, float]] = {}  # by thread, with the job's time limit in seconds
        self._away_since: float | None = None
        self._unwritable = False
        self._stopped_at, self._recovered_at = 0.0, time.monotonic()
        self._lock = threading.Lock()

    def run(self) -> int:
        """Until nothing waits, or the models stay away for too long. The exit code."""
        build_struct_types()
        try:
            recover(self._database)
            with WorkerLock(self._database) as self._sign:
                self._run_threads()
        except sqlite3.Error:
            log.exception("the grade book cannot be used")
            self._unwritable = True
        self._endpoints.close()
        if self._unwritable:
            return UNWRITABLE
        return MODELS_AWAY if self._impatient else 0

    def _run_threads(self) -> None:
        threads = [self._thread("checks") for _ in range(self._options.check_threads)]
        threads += [self._thread("models") for _ in range(self._options.model_threads)]
        try:
            while any(thread.is_alive() for thread in threads) and not self._grace_is_over():
                self._end_if_stuck()
                self._take_over()
                time.sleep(self._timeouts.watch_s)
        finally:
            self._stop.set()
            hand_back(self._database, self._sign.name)

    def _take_over(self) -> None:
        """Another worker may die beside this one: its jobs wait again."""
        if time.monotonic() - self._recovered_at > self._timeouts.recover_s:
            self._recovered_at = time.monotonic()
            recover(self._database)

    def stop(self) -> None:
        """Jobs that run get a moment to end; those that do not are handed back."""
        self._stopped_at = self._stopped_at or time.monotonic()
        self._stop.set()

    def _grace_is_over(self) -> bool:
        return bool(self._stopped_at) and time.monotonic() - self._stopped_at > self._timeouts.stop_s

    def _thread(self, stage: Stage) -> threading.Thread:
        thread = threading.Thread(target=self._loop, args=(stage,), name=stage, daemon=True)
        thread.start()
        return thread

    def _loop(self, stage: Stage) -> None:
        try:
            while not self._stop.is_set() and not self._gives_up(stage):
                if not (self._step(stage) or self._more_to_come(stage)):
                    break
        except sqlite3.Error:  # the disk is full, as a rule: no result can be stored, and no other thread can go on
            log.exception("the grade book cannot be used")
            self._unwritable = True
            self._stop.set()
        finally:
            self._database.close()

    def _step(self, stage: Stage) -> bool:
        """One job. False: none is waiting now."""
        job = claim(self._database, self._sign.name, stage)
        if job is None:
            return False
        limit_s = self._limit_s(job)
        with self._lock:
            self._busy[threading.get_ident()] = job, limit_s
        try:
            self._do(job)
        finally:
            with self._lock:
                del self._busy[threading.get_ident()]
        return True

    def _do(self, job: GradingJob) -> None:
        run: Callable[[Database, GradingJob, str, Endpoints], None] = (
            run_checks if job.stage == "checks" else run_models
        )
        try:
            run(self._database, job, self._sign.name, self._endpoints)
            if job.stage == "models":
                self._away_since = None
        except ModelsUnavailable as error:
            self._away_since = self._away_since or time.monotonic()
            postpone(self._database, job, self._sign.name, self._timeouts.models_retry_s, str(error))
        except sqlite3.Error:  # no fault of the notebook
            raise
        except (GraderError, DisaggError) as error:
            fail(self._database, job, self._sign.name, str(error))
        except Exception as error:  # one bad notebook must not stop the batch
            log.exception("a %s job of submission %d failed", job.stage, job.submission_id)
            fail(self._database, job, self._sign.name, f"the grader failed: {type(error).__name__}: {error}")

    def _more_to_come(self, stage: Stage) -> bool:
        """Waits a little where jobs of this stage may still come."""
        open_stages = self._open_stages()
        waits = stage in open_stages or (stage == "models" and "checks" in open_stages)
        if waits:
            self._stop.wait(self._timeouts.poll_s)
        return waits

    def _gives_up(self, stage: Stage) -> bool:
        """On models that stay away, when all else is done. Asked before each job: among many jobs one always waits."""
        return stage == "models" and self._impatient and "checks" not in self._open_stages()

    def _open_stages(self) -> set[str]:
        return {row["stage"] for row in self._database.rows(_OPEN)}

    @property
    def _impatient(self) -> bool:
        since = self._away_since
        return since is not None and time.monotonic() - since > self._options.patience_s

    def _end_if_stuck(self) -> None:
        """A thread cannot be ended: the process ends, and its other jobs wait again."""
        with self._lock:
            stuck = [one for one in self._busy.values() if time.time() - one[0].started_at > one[1]]
        for job, limit_s in stuck:
            fail(self._database, job, self._sign.name, f"grading took longer than {limit_s:.0f} s")
        if stuck:
            hand_back(self._database, self._sign.name)
            os._exit(_STUCK)

    def _limit_s(self, job: GradingJob) -> float:
        """Re-runs, the solution's among them, end by themselves, within the limits of the rubric."""
        if job.stage == "models":
            return self._timeouts.models_s
        limits = parse_rubric(rubric_version(self._database, job.rubric_version_id).content).limits
        return self._timeouts.checks_s + 2 * longest_run_s(limits.notebook_timeout_s)


_OPEN = "SELECT DISTINCT stage FROM jobs WHERE state IN ('waiting', 'running')"
