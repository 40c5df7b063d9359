"""The worker process, and the batch that starts and watches it."""

from grader.worker.batch import (
    Watched,
    WorkerFailed,
    ensure_worker,
    queue_all,
    queue_some,
    run_batch,
    start_worker,
    watched,
)
from grader.worker.timeouts import WorkerTimeouts
from grader.worker.worker import MODELS_AWAY, UNWRITABLE, Worker, WorkerOptions

__all__ = [
    "MODELS_AWAY",
    "UNWRITABLE",
    "Watched",
    "Worker",
    "WorkerFailed",
    "WorkerOptions",
    "WorkerTimeouts",
    "ensure_worker",
    "queue_all",
    "queue_some",
    "run_batch",
    "start_worker",
    "watched",
]
