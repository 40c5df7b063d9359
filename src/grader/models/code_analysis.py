"""Layer 3: the code model answers yes or no for each item, with the line that the answer rests on."""

import hashlib
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal

import msgspec

from grader.models.answers import AnswerUnreadable, choice_field, object_of, read_answer, text_field
from grader.models.fences import plain_spaces
from grader.models.quotes import Quotable
from grader.points import share_of
from grader.rubric import Item, Manual, ModelJudged, Rubric, item_hash
from grader.verdicts import Evidence, Status, Verdict

ZERO = Decimal(0)
_SHORTEST_QUOTE = 3  # letters and digits: a bracket proves nothing


class ItemAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """As the model gave it."""

    quote: str
    reason: str
    answer: Literal["yes", "no", "unsure"]
    confidence: Literal["high", "low"]


class ItemReading(msgspec.Struct, frozen=True, kw_only=True):
    """What one reading says of one item. `place`: where the quoted line stands. `void`: why the answer does not
    count."""

    item_id: str
    answer: Literal["yes", "no", "unsure"]
    quote: str = ""
    reason: str = ""
    void: str = ""
    place: Evidence | None = None
    prompt_sha: str = ""  # of the question that this answers


def asked_items(rubric: Rubric) -> list[Item]:
    """A model's answer about a `manual` item is advice for the instructor, without points."""
    return [item for item in rubric.items if isinstance(item.check, ModelJudged | Manual)]


def question_hash(item: Item) -> str:
    """All that can change a model's answer. Points cannot."""
    core = msgspec.structs.replace(item, title="", group="", feedback="", points=ZERO, ai_share=ZERO, deduction=False)
    return hashlib.sha256(msgspec.json.encode(core, order="deterministic")).hexdigest()[:16]


def code_schema(items: list[Item], text_chars: int = 300) -> dict[str, Any]:
    """One field for each item: none can be left out or answered twice."""
    answer = object_of(
        quote=text_field(text_chars),
        reason=text_field(text_chars),
        answer=choice_field("yes", "no", "unsure"),
        confidence=choice_field("high", "low"),
    )
    return object_of(**{item.id: answer for item in items})


def read_readings(text: str, items: list[Item], work: Quotable) -> tuple[ItemReading, ...]:
    """`work`: the student's texts as the model saw them."""
    found = read_answer(text, dict[str, ItemAnswer])
    if missing := [item.id for item in items if item.id not in found]:
        raise AnswerUnreadable(f"the model's answer leaves out {', '.join(missing)}")
    return tuple(_reading(item, found[item.id], work) for item in items)


def _reading(item: Item, given: ItemAnswer, work: Quotable) -> ItemReading:
    place = work.find(given.quote)
    return ItemReading(
        item_id=item.id,
        answer=given.answer,
        quote=given.quote,
        reason=given.reason,
        void=_void(given, place, work.fresh),
        place=place,
    )


def _void(given: ItemAnswer, place: Evidence | None, fresh: bool) -> str:
    quote = plain_spaces(given.quote)
    if quote and place is None:
        return "the quoted line is not in the notebook"
    if given.answer == "yes" and sum(c.isalnum() for c in quote) < _SHORTEST_QUOTE:
        return "the model said yes without a line that shows it"
    if given.answer == "yes" and place is not None and place.part == "output" and not fresh:
        return "the quoted line stands in a saved output alone, which anybody can write: re-run the notebook, or decide"
    if given.answer == "unsure":
        return "the model is not sure"
    return "the model's confidence is low" if given.confidence == "low" else ""


def unread(items: list[Item], problem: str) -> tuple[ItemReading, ...]:
    """Of an answer that did not come or cannot be read."""
    return tuple(ItemReading(item_id=item.id, answer="unsure", void=problem) for item in items)


def model_verdicts(
    rubric: Rubric, items: list[Item], readings: Mapping[str, tuple[ItemReading, ...]]
) -> tuple[Verdict, ...]:
    """`readings`: of each item, one for each time the model was asked."""
    return tuple(_verdict(rubric, item, readings[item.id]) for item in items)


def _verdict(rubric: Rubric, item: Item, readings: tuple[ItemReading, ...]) -> Verdict:
    problem = _problem(readings)
    first = readings[0]
    share = Fraction(0) if problem or isinstance(item.check, Manual) else Fraction(item.ai_share)
    decided = share_of(item.points, share, rubric.point_step)
    gained = decided if first.answer == "yes" else ZERO
    open_points = item.points - decided
    sign = -1 if item.deduction else 1
    return Verdict(
        item_id=item.id,
        status=_status(gained, open_points, item),
        points=sign * gained,
        max_points=sign * item.points,
        pending=ZERO if item.deduction else open_points,
        reason=problem or _reason(first, share),
        layer="code",
        evidence=(first.place,) if first.place and not first.void else (),
        item_hash=item_hash(rubric, item),
    )


def _status(gained: Decimal, open_points: Decimal, item: Item) -> Status:
    if open_points or not item.points:
        return "needs_review" if open_points else "earned"
    if item.deduction:
        return "not_earned" if gained else "earned"
    return "earned" if gained else "not_earned"


def _problem(readings: tuple[ItemReading, ...]) -> str:
    """Why the answers do not decide. Empty: they do."""
    if void := next((reading.void for reading in readings if reading.void), ""):
        return f"needs review: {void}"
    if len({reading.answer for reading in readings}) > 1:
        return "needs review: two readings of the same work differ"
    return ""


def _reason(reading: ItemReading, share: Fraction) -> str:
    says = f"the code model says {reading.answer}: {reading.reason or 'no reason given'}"
    return says if share else f"{says} (advice: this rubric gives the model no points to decide)"
