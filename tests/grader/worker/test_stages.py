"""The models' stage: what is asked, what is asked again, and what is stored."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from grader.grading import Grade, GradeSettings, answer_records, grades, grading_key
from grader.models import Figures, ModelSettings, ModelsUnavailable, Question, RawAnswer, text_sha
from grader.notebook import read_notebook
from grader.rubric import dump_rubric, load_rubric
from grader.sandbox import Rerun, code_tests_of, probes_of
from grader.store import (
    Assignment,
    Database,
    WorkerLock,
    answers,
    claim,
    fail,
    progress,
    put_rerun,
    save_assignment,
    save_rubric,
    submission,
)
from grader.worker import UNWRITABLE, Worker, WorkerOptions, queue_all
from grader.worker.stages import AssignmentChanged, Endpoints, run_checks, run_models
from tests.support.grade_books import RUBRIC, add_class, grade_here, make_book, work

_SETTINGS = GradeSettings(models=ModelSettings(code_model="code", feedback_model="feedback", in_parallel=False))
_FEEDBACK = {
    "strengths": [{"item": "general", "text": "Clear."}],
    "improvements": [],
    "reflection": {"quality": "thin", "comment": ""},
    "overall": "good",
    "instructor_comment": "",
}


class Scripted(Endpoints):
    """Says yes to every question, with a line of the notebook. `away`: models that cannot be reached."""

    def __init__(self) -> None:
        super().__init__()
        self.questions: list[Question] = []
        self.away: set[str] = set()

    def of(self, settings: ModelSettings) -> Any:
        return self

    def ask(self, question: Question) -> RawAnswer:
        if question.model in self.away:
            raise ModelsUnavailable(f"{question.model} is away")
        self.questions.append(question)
        yes = {"quote": "sales = [10, 20, 30]", "reason": "so it is", "answer": "yes", "confidence": "high"}
        content = {name: yes for name in question.schema["properties"]} if question.model == "code" else _FEEDBACK
        return RawAnswer(json.dumps(content), Figures(total_s=1.0))

    def asked(self) -> list[list[str]]:
        """Since the last look: the items of each code question, and `feedback`."""
        found = [list(one.schema["properties"]) if one.model == "code" else ["feedback"] for one in self.questions]
        self.questions.clear()
        return found


@pytest.fixture
def book(tmp_path: Path) -> tuple[Database, Assignment]:
    book, assignment = make_book(tmp_path)
    add_class(book, assignment, 2)
    return book, assignment


def _run(book: Database, assignment: Assignment, endpoints: Scripted, settings: GradeSettings = _SETTINGS) -> None:
    queue_all(book, assignment, settings)
    with WorkerLock(book) as worker:
        for stage, run in (("checks", run_checks), ("models", run_models)):
            while job := claim(book, worker.name, stage):  # type: ignore[arg-type]
                run(book, job, worker.name, endpoints)


def _changed(book: Database, old: str, new: str) -> Assignment:
    assert old in RUBRIC
    return save_rubric(book, "sales", dump_rubric(load_rubric(RUBRIC.replace(old, new))))


def test_a_changed_question_is_asked_alone(book: tuple[Database, Assignment]) -> None:
    endpoints = Scripted()
    _run(*book, endpoints)
    assert endpoints.asked() == [["names", "style"], ["feedback"]] * 2
    changed = _changed(book[0], "Is the style good?", "Is the style simple?")
    _run(book[0], changed, endpoints)
    assert endpoints.asked() == [["style"]] * 2  # the rubric's lines in the prompt have titles, not questions
    for grade in grades(book[0], changed):
        assert {one.item_id: one.status for one in grade.verdicts}["names"] == "earned"


def test_changed_points_ask_nothing(book: tuple[Database, Assignment]) -> None:
    endpoints = Scripted()
    _run(*book, endpoints)
    before = grades(*book)[0].score.total
    endpoints.asked()
    changed = _changed(book[0], "title: Clear names\n    points: 2", "title: Clear names\n    points: 3")
    _run(book[0], changed, endpoints)
    assert endpoints.asked() == []
    assert grades(book[0], changed)[0].score.total == before + 1


def _shas(book: Database, grade: Grade) -> list[str]:
    return [text_sha(one.prompt) for one in answers(book, grade.submission.id, grade.submission.current_key or "")]


def test_a_grade_of_kept_answers_has_their_prompts(book: tuple[Database, Assignment]) -> None:
    database, endpoints = book[0], Scripted()
    _run(*book, endpoints)
    before = grades(*book)[0]
    points = _changed(database, "title: Clear names\n    points: 2", "title: Clear names\n    points: 3")
    _run(database, points, endpoints)
    same = grades(database, points)[0]
    assert before.models
    assert same.models
    assert [run.prompt_sha for run in same.models.runs] == [run.prompt_sha for run in before.models.runs]
    assert _shas(database, same) == _shas(database, before)
    assert same.models.speedup is None
    for question in ("Is the style simple?", "Is the style short?"):
        _run(database, _changed(database, "Is the style good?", question), endpoints)
    part = grades(database, book[1])[0]
    assert part.models
    assert [run.layer for run in part.models.runs] == ["code", "code", "feedback"]  # none of a question in between
    assert set(_shas(database, part)) == {run.prompt_sha for run in part.models.runs}
    assert len(answer_records(database, book[1])) == 2 * 4  # of each notebook, as often as the models were asked


def test_changed_instructions_ask_about_every_item_again(book: tuple[Database, Assignment]) -> None:
    endpoints = Scripted()
    _run(*book, endpoints)
    endpoints.asked()
    _run(book[0], _changed(book[0], "Compute the mean", "Compute the mean and the median"), endpoints)
    assert endpoints.asked() == [["names", "style"], ["feedback"]] * 2


def test_a_changed_solution_asks_about_every_item_again(book: tuple[Database, Assignment]) -> None:
    endpoints = Scripted()
    _run(*book, endpoints)
    endpoints.asked()
    solution = work().replace(b"mean_sales = sum", b"mean_sales = 1.0 * sum")
    _run(book[0], save_assignment(book[0], "sales", book[1].rubric.content, solution=solution), endpoints)
    assert endpoints.asked() == [["names", "style"], ["feedback"]] * 2


def test_the_outputs_of_a_rerun_ask_about_every_item_again(book: tuple[Database, Assignment]) -> None:
    database, assignment = book
    endpoints = Scripted()
    _run(database, assignment, endpoints)
    endpoints.asked()
    _put_reruns(database, assignment, 1, 2)
    _run(database, assignment, endpoints, msgspec.structs.replace(_SETTINGS, rerun=True))
    assert endpoints.asked() == [["names", "style"], ["feedback"]] * 2


def test_an_answer_that_came_is_not_asked_for_again(book: tuple[Database, Assignment]) -> None:
    endpoints = Scripted()
    endpoints.away = {"feedback"}
    with pytest.raises(ModelsUnavailable):
        _run(*book, endpoints)
    assert endpoints.asked() == [["names", "style"]]
    endpoints.away = set()
    _run(*book, endpoints)
    assert endpoints.asked() == [["feedback"], ["names", "style"], ["feedback"]]


def test_prompts_answers_and_hashes_are_stored(book: tuple[Database, Assignment]) -> None:
    _run(*book, Scripted())
    grade = grades(*book)[0]
    assert grade.submission.current_key == grading_key(book[1], _SETTINGS)
    assert grade.record.rubric_hash == book[1].rubric.hash
    assert grade.record.settings["models"]["seed"] == 1
    assert grade.models
    stored = answers(book[0], grade.submission.id, grade.submission.current_key)
    assert [one.layer for one in stored] == ["code", "feedback"]
    assert "Do the variables have clear names?" in json.loads(stored[0].prompt)["messages"][1]["content"]
    assert len({run.prompt_sha for run in grade.models.runs}) == 2


def test_a_solution_that_changes_under_a_run_mixes_no_points(book: tuple[Database, Assignment]) -> None:
    """What was queued for one solution is not graded by another; queued again, it is."""
    database, first = book
    queue_all(database, first, _SETTINGS)
    with WorkerLock(database) as worker:
        job = claim(database, worker.name, "checks")
        assert job
        second = save_assignment(database, "sales", first.rubric.content, solution=work(21))
        with pytest.raises(AssignmentChanged, match="grade it again"):
            run_checks(database, job, worker.name, Scripted())
        fail(database, job, worker.name, "changed")
    grade_here(database, second)
    assert {one.record.solution_sha for one in grades(database, second)} == {second.solution_sha}


def _put_reruns(book: Database, assignment: Assignment, *ids: int) -> None:
    """As if these submissions and the solution had run, and printed 99."""
    rubric, notebook = load_rubric(assignment.rubric.content), read_notebook(work(99), "fresh")
    settings = msgspec.to_builtins([rubric.limits, assignment.inputs, code_tests_of(rubric), probes_of(rubric)])
    run = msgspec.json.encode(Rerun(notebook=notebook, status="finished", backend="test")).decode()
    for sha in (*(submission(book, one).blob_sha for one in ids), assignment.solution_sha):
        assert sha
        put_rerun(book, sha, settings, run)


def test_models_see_the_outputs_of_the_rerun(tmp_path: Path) -> None:
    book, assignment = make_book(tmp_path, RUBRIC.replace("ai_share_max", "rerun: true\nai_share_max"))
    work_id = add_class(book, assignment, 1)[0]
    _put_reruns(book, assignment, work_id)
    endpoints = Scripted()
    _run(book, assignment, endpoints)
    assert "| 99" in endpoints.questions[0].messages[1]["content"]


def test_a_grade_book_that_cannot_be_written_ends_the_worker(book: tuple[Database, Assignment]) -> None:
    """As on a full disk: no thread waits for results that cannot come, and no notebook fails for it."""
    database, assignment = book
    refuse = "CREATE TRIGGER full BEFORE INSERT ON gradings BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END"
    database.connection.execute(refuse)
    queue_all(database, assignment, GradeSettings())
    assert Worker(database.path.parent, WorkerOptions()).run() == UNWRITABLE
    state = progress(database, assignment.id)
    assert (state.checks.waiting, state.failures) == (2, ())
    database.connection.execute("DROP TRIGGER full")
    grade_here(database, assignment)
    assert len(grades(database, assignment)) == 2
