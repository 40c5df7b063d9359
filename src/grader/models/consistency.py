"""Does the feedback say what the points and the work say? A contradiction is a flag for the instructor. Points of
layers 1 and 2 never change by it; what the code model alone decided goes to review."""

import re
from collections.abc import Iterator
from decimal import Decimal

from grader.models.feedback import Feedback
from grader.rubric import Rubric, Words
from grader.scoring import Score
from grader.verdicts import Flag, Verdict

CODE = "feedback_contradicts"
_LOW, _HIGH = Decimal(50), Decimal(90)  # percent
_NAMES_POINTS = re.compile(
    r"\b\d+(?:\.\d+)?\s*(?:/|out of)\s*\d+\b|\b\d+(?:\.\d+)?\s*(?:points?|marks?|%)(?!\w)"
    r"|\bfull (?:marks|points|credit)\b|\bgraded?:? (?:of )?(?:an? )?[A-F][+-]?(?!\w)",
    re.IGNORECASE,
)


def contradictions(
    feedback: Feedback, rubric: Rubric, verdicts: tuple[Verdict, ...], score: Score, unfounded: tuple[str, ...] = ()
) -> tuple[Flag, ...]:
    """`unfounded`: what was found when the feedback was written."""
    messages = [
        *contradicted_items(feedback, verdicts).values(),
        *_about_the_reflection(feedback, rubric, verdicts),
        *_about_the_whole(feedback, score),
        *_about_points(feedback),
        *_about_sense(feedback),
        *unfounded,
    ]
    return tuple(Flag(code=CODE, message=message) for message in messages)


def contradicted_items(feedback: Feedback, verdicts: tuple[Verdict, ...]) -> dict[str, str]:
    """By item, what contradicts its verdict."""
    return dict(_about_items(feedback, verdicts))


def _about_items(feedback: Feedback, verdicts: tuple[Verdict, ...]) -> Iterator[tuple[str, str]]:
    status = {verdict.item_id: verdict.status for verdict in verdicts}
    for strength in feedback.strengths:
        if status.get(strength.item) == "not_earned":
            yield strength.item, f"the feedback praises {strength.item}, which earned no points"
    for improvement in feedback.improvements:
        if status.get(improvement.item) == "earned":
            yield improvement.item, f"the feedback criticises {improvement.item}, which earned all its points"


def _about_the_reflection(feedback: Feedback, rubric: Rubric, verdicts: tuple[Verdict, ...]) -> Iterator[str]:
    """Enough words can be thin. None at all, or depth without words, cannot be."""
    counted = [one for one in verdicts if isinstance(rubric.item(one.item_id).check, Words)]
    quality = feedback.reflection.quality
    if quality in ("adequate", "deep") and counted and all(one.status == "not_earned" for one in counted):
        yield f"the feedback calls the reflection {quality}; {counted[0].item_id} earned no points"
    if quality == "none" and (written := [one for one in counted if one.status == "earned"]):
        yield f"the feedback finds no reflection; {written[0].item_id} earned all its points"


def _about_the_whole(feedback: Feedback, score: Score) -> Iterator[str]:
    percent = score.percent
    if feedback.overall == "excellent" and percent < _LOW and not score.pending:
        yield f"the feedback calls the work excellent; it has {percent:.0f} %"
    if feedback.overall == "weak" and percent >= _HIGH:
        yield f"the feedback calls the work weak; it has {percent:.0f} %"


def _about_points(feedback: Feedback) -> Iterator[str]:
    if found := _NAMES_POINTS.search(" ".join(texts(feedback))):
        yield f"the feedback names points or a grade: {found.group()!r}"


def _about_sense(feedback: Feedback) -> Iterator[str]:
    """Small models repeat one sentence, or the prompt."""
    said = [text.strip() for text in texts(feedback) if text.strip()]
    if len(said) > 3 and len(set(said)) <= len(said) / 2:
        yield "the feedback repeats itself"
    if any("STUDENT WORK" in text.upper() or "STUDENT'S WORK STANDS" in text.upper() for text in said):
        yield "the feedback repeats its prompt"


def texts(feedback: Feedback) -> list[str]:
    """All that a student would read."""
    improvements = [text for one in feedback.improvements for text in (one.what, one.why, one.how, one.example)]
    return [*(one.text for one in feedback.strengths), *improvements, feedback.reflection.comment]
