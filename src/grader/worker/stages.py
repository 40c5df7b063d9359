"""The two stages of a grading: checks (layers 1 and 2), then models (layers 3 and 4). Each stores its result whole."""

import threading
import time

import msgspec

from grader.errors import GraderError
from grader.grading import (
    ChecksResult,
    GradeSettings,
    check_notebook,
    grading_key,
    parse_rubric,
    record_of,
    rerun_of,
)
from grader.models import (
    Endpoint,
    Figures,
    ModelSettings,
    ModelsUnavailable,
    Question,
    RawAnswer,
    Work,
    analyse,
    connect,
    prompt_text,
)
from grader.notebook import Notebook, read_notebook
from grader.store import (
    Assignment,
    Database,
    Grading,
    GradingJob,
    RubricVersion,
    StoredAnswer,
    StoredSubmission,
    assignment_by_id,
    blob,
    finish,
    follow_up,
    grading,
    known_answer,
    names_of,
    put_answer,
    put_checks,
    put_models,
    rubric_version,
    submission,
)
from grader.worker.answer_reuse import copy_answers, unchanged_readings


class AssignmentChanged(GraderError):
    """The job was queued for other files."""


class Endpoints:
    """One connection for each place where models are reached, shared by all threads."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], Endpoint] = {}
        self._lock = threading.Lock()

    def of(self, settings: ModelSettings) -> Endpoint:
        place = settings.config, settings.endpoint
        with self._lock:
            if place not in self._open:
                self._open[place] = connect(settings)
            return self._open[place]

    def close(self) -> None:
        for endpoint in self._open.values():
            endpoint.close()


def run_checks(database: Database, job: GradingJob, worker: str, endpoints: Endpoints) -> None:
    settings = msgspec.json.decode(job.settings, type=GradeSettings)
    work = submission(database, job.submission_id)
    version = rubric_version(database, job.rubric_version_id)
    assignment = _asked_for(database, work, version, settings, job)
    result = check_notebook(database, assignment, parse_rubric(version.content), work, settings.rerun)
    stored = Grading(
        submission_id=work.id,
        key=job.key,
        rubric_version_id=version.id,
        record=_json(record_of(assignment, version, work.blob_sha, settings)),
        checks=_json(result),
        models=None,
        made_at=time.time(),
    )
    with database.transaction() as connection:
        if finish(connection, job, worker):
            put_checks(connection, stored)
            if settings.models and result.readable:
                follow_up(connection, job)


def run_models(database: Database, job: GradingJob, worker: str, endpoints: Endpoints) -> None:
    settings = msgspec.json.decode(job.settings, type=GradeSettings)
    assert settings.models
    asker = _Asker(database, job, endpoints.of(settings.models))
    result = analyse(_work(database, job, settings, settings.models), settings.models, asker.ask)
    copy_answers(database, job.submission_id, job.key, result.runs)
    with database.transaction() as connection:
        if finish(connection, job, worker):
            put_models(connection, job.submission_id, job.key, _json(result))


def _asked_for(
    database: Database, work: StoredSubmission, version: RubricVersion, settings: GradeSettings, job: GradingJob
) -> Assignment:
    """The assignment as it was when the job was queued: its key says so. Other files would give other points under the
    same key."""
    found = msgspec.structs.replace(assignment_by_id(database, work.assignment_id), rubric=version)
    if grading_key(found, settings) != job.key:
        raise AssignmentChanged(
            "the solution, the template, the data files or the grader changed after this was queued: grade it again"
        )
    return found


def _work(database: Database, job: GradingJob, settings: GradeSettings, models: ModelSettings) -> Work:
    found = submission(database, job.submission_id)
    version = rubric_version(database, job.rubric_version_id)
    assignment = _asked_for(database, found, version, settings, job)
    stored = grading(database, found.id, job.key)
    assert stored
    assert stored.checks
    rubric = parse_rubric(version.content)
    rerun = settings.rerun or rubric.rerun
    fresh = rerun_of(database, assignment, rubric, found.blob_sha) if rerun else None
    work = Work(
        rubric=rubric,
        notebook=fresh.notebook if fresh else _notebook(database, found),
        fresh=fresh is not None,
        solution=_solution(database, assignment),
        verdicts=msgspec.json.decode(stored.checks, type=ChecksResult).verdicts,
        names=names_of(database, found.id),
        secret=database.secret("fences"),
    )
    known, runs = unchanged_readings(database, found, work, job.key, models)
    return msgspec.structs.replace(work, known=known, known_runs=runs)


def _notebook(database: Database, found: StoredSubmission) -> Notebook:
    return read_notebook(blob(database, found.blob_sha), found.pseudonym)


def _solution(database: Database, assignment: Assignment) -> Notebook | None:
    return read_notebook(blob(database, assignment.solution_sha), "solution") if assignment.solution_sha else None


class _Asker:
    """Asks the models, and stores every prompt and answer at once: after a kill no answered question is asked again."""

    def __init__(self, database: Database, job: GradingJob, endpoint: Endpoint) -> None:
        self._database, self._job, self._endpoint = database, job, endpoint

    def ask(self, layer: str, number: int, question: Question) -> RawAnswer:
        prompt = prompt_text(question)
        if known := known_answer(self._database, self._job.submission_id, layer, number, prompt):
            return RawAnswer(known.answer, msgspec.json.decode(known.figures, type=Figures), reused=True)
        answer, error = RawAnswer("", Figures(total_s=0.0)), ""
        try:
            answer = self._endpoint.ask(question)
        except ModelsUnavailable:
            raise
        except Exception as failed:
            error = str(failed)
            raise
        finally:
            if answer.text or error:
                self._store(layer, number, question.model, prompt, answer, error)
        return answer

    def _store(self, layer: str, number: int, model: str, prompt: str, answer: RawAnswer, error: str) -> None:
        stored = StoredAnswer(
            layer=layer,
            reading=number,
            model=model,
            prompt=prompt,
            answer=answer.text,
            error=error,
            figures=_json(answer.figures),
            at=time.time(),
        )
        put_answer(self._database, self._job.submission_id, self._job.key, stored)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
