"""Layer 4: feedback for the student, by the feedback model. A draft: an instructor approves it. It has no points."""

from typing import Any, Literal

import msgspec

from grader.models.answers import choice_field, list_of, object_of, read_answer, text_field
from grader.rubric import Rubric

Quality = Literal["none", "thin", "adequate", "deep"]
Overall = Literal["weak", "fair", "good", "excellent"]


class Strength(msgspec.Struct, frozen=True):
    item: str
    text: str


class Improvement(msgspec.Struct, frozen=True):
    item: str
    what: str
    why: str
    how: str
    example: str


class Reflection(msgspec.Struct, frozen=True):
    quality: Quality
    comment: str


class Feedback(msgspec.Struct, frozen=True, kw_only=True):
    strengths: tuple[Strength, ...]
    improvements: tuple[Improvement, ...]
    reflection: Reflection
    overall: Overall
    instructor_comment: str  # not for the student


def feedback_schema(rubric: Rubric, text_chars: int = 300, remarks: int = 3) -> dict[str, Any]:
    item = choice_field(*(item.id for item in rubric.items), "general")
    words = text_field(text_chars)
    strength = object_of(item=item, text=words)
    improvement = object_of(item=item, what=words, why=words, how=words, example=words)
    return object_of(
        strengths=list_of(strength, 1, remarks),
        improvements=list_of(improvement, 0, remarks),
        reflection=object_of(quality=choice_field("none", "thin", "adequate", "deep"), comment=words),
        overall=choice_field("weak", "fair", "good", "excellent"),
        instructor_comment=words,
    )


def read_feedback(text: str) -> Feedback:
    return read_answer(text, Feedback)
