"""How far a batch is: counts of jobs by stage and state, and the time that is likely left."""

import msgspec

from grader.store.database import Database


class StageProgress(msgspec.Struct, frozen=True, kw_only=True):
    waiting: int = 0
    running: int = 0
    done: int = 0
    failed: int = 0

    @property
    def total(self) -> int:
        return self.waiting + self.running + self.done + self.failed

    @property
    def left(self) -> int:
        return self.waiting + self.running


class BatchProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Of one assignment's current gradings."""

    checks: StageProgress
    models: StageProgress
    waiting_reason: str = ""  # of jobs that were postponed: the models are away
    failures: tuple[tuple[str, str], ...] = ()  # pseudonym and error

    @property
    def is_over(self) -> bool:
        return not self.checks.left and not self.models.left


_CURRENT = (
    " FROM jobs JOIN submissions ON submissions.id = submission_id AND submissions.current_key = jobs.key"
    " JOIN students ON students.id = student_id WHERE assignment_id = ? AND NOT superseded"
)


def progress(database: Database, assignment_id: int) -> BatchProgress:
    rows = database.rows(
        "SELECT stage, state, count(*) AS count" + _CURRENT + " GROUP BY stage, state", (assignment_id,)
    )
    stages: dict[str, dict[str, int]] = {"checks": {}, "models": {}}
    for row in rows:
        stages[row["stage"]][row["state"]] = row["count"]
    reason = database.row(
        "SELECT error" + _CURRENT + " AND state = 'waiting' AND error != '' ORDER BY not_before DESC", (assignment_id,)
    )
    failed = database.rows("SELECT pseudonym, error" + _CURRENT + " AND state = 'failed'", (assignment_id,))
    return BatchProgress(
        checks=StageProgress(**stages["checks"]),
        models=StageProgress(**stages["models"]),
        waiting_reason=reason["error"] if reason else "",
        failures=tuple((row["pseudonym"], row["error"]) for row in failed),
    )


def finished_since(database: Database, at: float, stage: str) -> int:
    row = database.row("SELECT count(*) AS count FROM journal WHERE at >= ? AND stage = ?", (at, stage))
    assert row
    count: int = row["count"]
    return count
