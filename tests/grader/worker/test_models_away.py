"""The worker is killed and the model cluster dies while a batch runs: checks finish, the models' jobs wait, and go on
when the cluster is back. Nothing is graded twice or lost."""

import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from grader.grading import GradeSettings, grades
from grader.models import HttpEndpoint, ModelSettings, ModelsUnavailable, connect
from grader.store import Assignment, Database, answers, progress, submissions
from grader.worker import MODELS_AWAY, Worker, WorkerOptions, WorkerTimeouts, queue_all, run_batch, start_worker
from tests.support.cluster import Process, free_port
from tests.support.gateway import gateway_process, simulated_config, simulated_pair
from tests.support.grade_books import add_class, known_points, make_book
from tests.support.waiting import until

pytestmark = pytest.mark.slow

_COUNT = 50
_READABLE = 45  # every tenth is no notebook
_QUICK = WorkerTimeouts(models_retry_s=0.2)
_MODEL = "simulated:tiny"


@pytest.fixture
def pair() -> Iterator[tuple[Process, Process]]:
    with simulated_pair() as pair:
        yield pair


def _settings(folder: Path, pair: tuple[Process, Process]) -> ModelSettings:
    config = folder / "cluster.json"
    config.write_text(json.dumps(simulated_config(*pair)))
    return ModelSettings(
        code_model=_MODEL, feedback_model=_MODEL, config=str(config), timeout_s=120, code_tokens=48, feedback_tokens=48
    )


def _read(book: Database) -> int:
    return len(book.rows("SELECT id FROM journal WHERE stage = 'models'"))


def _points(book: Database, assignment: Assignment) -> dict[int, object]:
    return {one.submission.id: one.score.total for one in grades(book, assignment)}


def _kill_at(book: Database, worker: "subprocess.Popen[bytes]", read: int) -> None:
    """In the middle of the models' work, as a rule of several jobs."""
    assert until(lambda: worker.poll() is not None or _read(book) >= read, 180)
    assert worker.poll() is None, "the fault happens while it works"
    worker.kill()
    worker.wait()


def test_fifty_survive_a_worker_and_a_cluster_that_die(tmp_path: Path, pair: tuple[Process, Process]) -> None:
    book, assignment = make_book(tmp_path)
    add_class(book, assignment, _COUNT)
    queue_all(book, assignment, GradeSettings(models=_settings(tmp_path, pair)))
    for band in ((1, 3), (8, 11), (16, 19)):
        moment = random.Random().randint(*band)
        _kill_at(book, start_worker(book, WorkerOptions(model_threads=2, timeouts=_QUICK)), moment)
    options = WorkerOptions(model_threads=1, patience_s=0.5, timeouts=_QUICK)
    worker, before = start_worker(book, options), _read(book)
    assert until(lambda: _read(book) > before, 120)
    for node in pair:
        node.kill()
    assert worker.wait(300) == MODELS_AWAY  # its patience ended
    state = progress(book, assignment.id)
    assert state.checks.done == _COUNT  # the fault happened, and the checks went on
    assert state.models.left > 0
    assert state.waiting_reason
    assert _points(book, assignment) == {one: known_points(one) for one in range(1, _COUNT + 1)}
    assert all(one.score.needs_review for one in grades(book, assignment) if one.checks.readable)

    for node in pair:
        node.start()
    for node in pair:
        node.ready()
    after = run_batch(book, assignment, WorkerOptions(model_threads=2, timeouts=_QUICK), lambda _: None)
    assert (after.models.done, after.models.left, after.models.failed) == (_READABLE, 0, 0)
    once = book.rows("SELECT count(*) AS times FROM journal GROUP BY submission_id, stage")
    assert [row["times"] for row in once] == [1] * (_COUNT + _READABLE)
    asked = book.rows("SELECT count(*) AS times FROM answers WHERE error = '' GROUP BY submission_id, layer, reading")
    assert [row["times"] for row in asked] == [1] * (2 * _READABLE)
    _every_grade_has_its_record(book, assignment)


def _every_grade_has_its_record(book: Database, assignment: Assignment) -> None:
    moved = 0
    for grade in grades(book, assignment):
        assert grade.record.rubric_hash
        if grade.checks.readable:
            assert grade.models
            assert grade.models.speedup or any(run.reused for run in grade.models.runs)
            stored = answers(book, grade.submission.id, grade.submission.current_key or "")
            assert {one.layer for one in stored} == {"code", "feedback"}
            figures = [msgspec.json.decode(one.figures) for one in stored]
            assert all(each.startswith("simulated-") for one in figures for each in one["weights"])
            assert all(one["weights"] for one in figures)
            assert all(one["prefill_s"] is not None and one["decode_s"] is not None for one in figures)
            handed = [one for one in figures if one["method"].startswith("disaggregated")]
            assert all(one["transfer_s"] is not None and one["kv_bytes"] is not None for one in handed)
            moved += sum(one["kv_bytes"] > 0 for one in handed)
    assert moved, "KV went from node to node"
    everything = "".join(row["prompt"] for row in book.rows("SELECT prompt FROM answers"))
    assert "Family" not in everything
    assert "student1" not in everything
    assert any(row["figures"] for row in book.rows("SELECT figures FROM answers"))


def test_patience_ends_also_where_many_jobs_wait(tmp_path: Path) -> None:
    """Among many jobs one always waits for its next try: the worker gives up all the same, and says so."""
    book, assignment = make_book(tmp_path)
    add_class(book, assignment, 30)
    away = ModelSettings(endpoint=f"http://127.0.0.1:{free_port()}/v1")
    queue_all(book, assignment, GradeSettings(models=away))
    options = WorkerOptions(model_threads=1, patience_s=0.5, timeouts=WorkerTimeouts(models_retry_s=0.0))
    assert Worker(tmp_path, options).run() == MODELS_AWAY
    state = progress(book, assignment.id)
    assert (state.checks.done, state.models.done, state.models.left) == (30, 0, 27)
    assert "refused" in state.waiting_reason
    assert all(one.score.needs_review for one in grades(book, assignment) if one.checks.readable)


def test_any_openai_endpoint_will_do(tmp_path: Path, pair: tuple[Process, Process]) -> None:
    book, assignment = make_book(tmp_path / "book")
    add_class(book, assignment, 2)
    with gateway_process(tmp_path, simulated_config(*pair)) as gateway:
        settings = ModelSettings(code_model=_MODEL, feedback_model=_MODEL, endpoint=f"{gateway.url}/v1")
        assert _MODEL in HttpEndpoint(f"{gateway.url}/v1").health()["models"]
        queue_all(book, assignment, GradeSettings(models=settings))
        state = run_batch(book, assignment, WorkerOptions(timeouts=_QUICK), lambda _: None)
    assert state.models.done == 2
    first = submissions(book, assignment.id)[0]
    figures = msgspec.json.decode(answers(book, first.id, first.current_key or "")[0].figures)
    assert figures["method"] == "disaggregated_simulated"
    assert len(figures["weights"]) == 1, "as the gateway's list of models tells it"
    assert figures["weights"][0].startswith("simulated-")
    with pytest.raises(ModelsUnavailable, match="refused"):
        connect(settings).health()
