"""Layers 3 and 4 together: the code model and the feedback model read the same work at the same time."""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from grader.errors import GraderError
from grader.models.code_analysis import (
    ItemReading,
    asked_items,
    code_schema,
    model_verdicts,
    question_hash,
    read_readings,
    unread,
)
from grader.models.endpoint import AnswerRefused, AnswerTooSlow, Figures, Question, RawAnswer
from grader.models.feedback import Feedback, feedback_schema, read_feedback
from grader.models.named_evidence import unfounded
from grader.models.prompts import code_messages, feedback_messages, shared_part, shown, student_part, without_names
from grader.models.quotes import Quotable, quotable
from grader.models.settings import ModelSettings
from grader.notebook import Notebook
from grader.rubric import Item, Rubric
from grader.verdicts import Verdict

Ask = Callable[[str, int, Question], RawAnswer]  # layer, number of the reading, question
Given = TypeVar("Given")


class LayerRun(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of one model. `problem`: why it does not count."""

    layer: str
    reading: int
    model: str
    prompt_sha: str
    figures: Figures | None = None
    problem: str = ""
    reused: bool = False  # of an earlier grading


class ModelsResult(msgspec.Struct, frozen=True, kw_only=True):
    """What both models said. `speedup`: the time one after the other over the time that passed.
    None where an answer is of an earlier grading: its time did not pass now."""

    verdicts: tuple[Verdict, ...]
    readings: dict[str, tuple[ItemReading, ...]]  # by item, one for each time that the model was asked
    questions: dict[str, str]  # hash of each item's question
    context: str = ""  # hash of all else that the code model read
    feedback: Feedback | None
    unfounded: tuple[str, ...] = ()  # what the feedback says is in the work, and is not
    runs: tuple[LayerRun, ...]
    wall_s: float
    sequential_s: float

    @property
    def speedup(self) -> float | None:
        asked_all = self.wall_s and not any(run.reused for run in self.runs)
        return self.sequential_s / self.wall_s if asked_all else None


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """One submission for the models. `names`: of the student, never sent. `secret`: for the fence. `fresh`: the
    notebook's outputs are of a re-run."""

    rubric: Rubric
    notebook: Notebook
    solution: Notebook | None
    verdicts: tuple[Verdict, ...]  # of layers 1 and 2
    names: tuple[str, ...]
    secret: bytes
    fresh: bool = False
    known: Mapping[str, tuple[ItemReading, ...]] = {}  # earlier answers about items that did not change
    known_runs: tuple[LayerRun, ...] = ()  # that gave them


def analyse(work: Work, settings: ModelSettings, ask: Ask) -> ModelsResult:
    """`ask` raises ModelsUnavailable where the whole should be tried again later."""
    started = time.monotonic()
    parts = _Parts(
        shared_part(work.rubric, work.solution),
        quotable(work.notebook, work.names, work.fresh),
        _student(work),
    )
    with ThreadPoolExecutor(max_workers=2 if settings.in_parallel else 1) as pool:
        code = pool.submit(_analyse_code, work, parts, settings, ask)
        feedback = pool.submit(_write_feedback, work, parts, settings, ask)
        verdicts, readings, code_runs = code.result()
        written, feedback_run = feedback.result()
    runs = (*work.known_runs, *code_runs, feedback_run)
    return ModelsResult(
        verdicts=verdicts,
        readings=readings,
        questions={item.id: question_hash(item) for item in asked_items(work.rubric)},
        context=context_hash(work),
        feedback=written,
        unfounded=unfounded(written, work.rubric, work.notebook, work.names) if written else (),
        runs=runs,
        wall_s=time.monotonic() - started,
        sequential_s=sum(run.figures.total_s for run in runs if run.figures and not run.reused),
    )


def context_hash(work: Work) -> str:
    """Of the code model's prompt without the items: instructions, solution, the work with its outputs. An earlier
    answer stands only where all of it is the same."""
    shared = shared_part(msgspec.structs.replace(work.rubric, items=()), work.solution)
    return text_sha(json.dumps([code_messages(shared, [], _student(work)), work.fresh]))


def _student(work: Work) -> str:
    return student_part(without_names(shown(work.notebook), work.names), work.secret)


class _Parts(msgspec.Struct, frozen=True):
    shared: str
    work: Quotable
    student: str


def _analyse_code(
    work: Work, parts: _Parts, settings: ModelSettings, ask: Ask
) -> tuple[tuple[Verdict, ...], dict[str, tuple[ItemReading, ...]], list[LayerRun]]:
    asked = asked_items(work.rubric)
    items = [item for item in asked if item.id not in work.known]
    rounds = range(settings.readings) if items else ()
    answered = [_read_code(items, parts, settings, ask, number) for number in rounds]
    new = {item.id: tuple(row[place] for row, _ in answered) for place, item in enumerate(items)}
    readings = {item.id: work.known.get(item.id) or new[item.id] for item in asked}
    return model_verdicts(work.rubric, asked, readings), readings, [run for _, run in answered]


def _read_code(
    items: list[Item], parts: _Parts, settings: ModelSettings, ask: Ask, number: int
) -> tuple[tuple[ItemReading, ...], LayerRun]:
    question = Question(
        model=settings.code_model,
        messages=code_messages(parts.shared, items, parts.student),
        schema=code_schema(items, settings.text_chars),
        seed=settings.seed + number,
        temperature=settings.temperature if settings.readings == 1 else max(settings.temperature, 0.3),
        max_tokens=settings.code_tokens,
        timeout_s=settings.timeout_s,
    )
    readings, run = _asked("code", number, question, ask, lambda text: read_readings(text, items, parts.work))
    found = readings if readings is not None else unread(items, run.problem)
    return tuple(msgspec.structs.replace(one, prompt_sha=run.prompt_sha) for one in found), run


def _write_feedback(work: Work, parts: _Parts, settings: ModelSettings, ask: Ask) -> tuple[Feedback | None, LayerRun]:
    question = Question(
        model=settings.feedback_model,
        messages=feedback_messages(parts.shared, work.verdicts, parts.student),
        schema=feedback_schema(work.rubric, settings.text_chars, settings.remarks),
        seed=settings.seed,
        temperature=settings.temperature,
        max_tokens=settings.feedback_tokens,
        timeout_s=settings.timeout_s,
    )
    return _asked("feedback", 0, question, ask, read_feedback)


def _asked(
    layer: str, number: int, question: Question, ask: Ask, read: Callable[[str], Given]
) -> tuple[Given | None, LayerRun]:
    run = LayerRun(layer=layer, reading=number, model=question.model, prompt_sha=prompt_sha(question))
    try:
        raw = ask(layer, number, question)
    except (AnswerRefused, AnswerTooSlow) as error:
        return None, msgspec.structs.replace(run, problem=str(error))
    run = msgspec.structs.replace(run, figures=raw.figures, reused=raw.reused)
    try:
        return read(raw.text), run
    except GraderError as error:
        return None, msgspec.structs.replace(run, problem=str(error))


def prompt_text(question: Question) -> str:
    """Everything that decides the answer, as JSON: what is stored."""
    fields = msgspec.to_builtins(question)
    fields.pop("timeout_s")
    return json.dumps(fields, ensure_ascii=False)


def prompt_sha(question: Question) -> str:
    return text_sha(prompt_text(question))


def text_sha(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
