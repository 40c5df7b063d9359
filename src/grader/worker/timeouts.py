"""Every time limit of the worker and of those who watch it."""

import msgspec


class WorkerTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    poll_s: float = 0.2  # how often an idle thread looks for jobs
    watch_s: float = 0.2  # how often the process looks at its threads
    models_retry_s: float = 2.0  # until a job is tried again whose models were away
    checks_s: float = 600.0  # for the checks of one notebook, without re-runs
    models_s: float = 3600.0  # for both models' answers about one notebook
    recover_s: float = 2.0  # how often a worker looks for others that died
    stop_s: float = 5.0  # for running jobs when the worker is told to end
    restart_s: float = 0.5  # until a worker that ended is started again
