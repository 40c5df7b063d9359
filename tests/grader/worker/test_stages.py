"""The models' stage: what is asked, what is asked again, and what is stored."""

import json
from pathlib import Path
from typing import Any

import pytest

from grader.grading import GradeSettings, grades, grading_key
from grader.models import Figures, ModelSettings, ModelsUnavailable, Question, RawAnswer
from grader.rubric import dump_rubric, load_rubric
from grader.store import Assignment, Database, WorkerLock, answers, claim, save_rubric
from grader.worker import queue_all
from grader.worker.stages import Endpoints, run_checks, run_models
from tests.support.grade_books import RUBRIC, add_class, make_book

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


def _run(book: Database, assignment: Assignment, endpoints: Scripted) -> None:
    queue_all(book, assignment, _SETTINGS)
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
