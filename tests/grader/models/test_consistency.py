"""Feedback that contradicts points or evidence is flagged; points stay."""

from decimal import Decimal

import msgspec
import pytest

from grader.models import Feedback, Improvement, Reflection, Strength, contradictions
from grader.scoring import Component, Score
from grader.verdicts import Status, Verdict

_FEEDBACK = Feedback(
    strengths=(Strength("general", "Clear."),),
    improvements=(),
    reflection=Reflection("thin", "Say more."),
    overall="good",
    instructor_comment="",
)


def _verdict(status: Status) -> Verdict:
    points = Decimal(4 if status == "earned" else 0)
    return Verdict(item_id="mean", status=status, points=points, max_points=Decimal(4), reason="r", layer="outputs")


def _score(percent: int) -> Score:
    line = Component(id="x", title="x", kind="item", points=Decimal(percent), reason="r", max_points=Decimal(100))
    return Score(components=(line,), total=line.points, maximum=Decimal(100), percent=Decimal(percent), letter="A")


@pytest.mark.parametrize(
    ("change", "status", "percent", "says"),
    [
        ({"strengths": (Strength("mean", "Right."),)}, "not_earned", 70, "praises mean"),
        ({"improvements": (Improvement("mean", "a", "b", "c", "d"),)}, "earned", 70, "criticises mean"),
        ({"overall": "excellent"}, "earned", 20, "excellent"),
        ({"strengths": (Strength("general", "Fine."),) * 4}, "earned", 70, "repeats itself"),
        (
            {"strengths": (Strength("general", "The student's work stands"),)},
            "earned",
            70,
            "repeats its prompt",
        ),
        ({"overall": "weak"}, "earned", 95, "weak"),
        ({"strengths": (Strength("general", "I give 10/10."),)}, "earned", 70, "names points"),
        ({"strengths": (Strength("general", "This deserves full marks"),)}, "earned", 70, "names points"),
    ],
)
def test_a_contradiction_is_flagged(change: dict[str, object], status: Status, percent: int, says: str) -> None:
    feedback = msgspec.structs.replace(_FEEDBACK, **change)
    flags = contradictions(feedback, (_verdict(status),), _score(percent))
    assert [flag.code for flag in flags] == ["feedback_contradicts"]
    assert says in flags[0].message


def test_feedback_that_fits_is_not_flagged() -> None:
    feedback = msgspec.structs.replace(_FEEDBACK, strengths=(Strength("mean", "You used 3 of the 4 regions."),))
    assert contradictions(msgspec.structs.replace(feedback), (_verdict("earned"),), _score(80)) == ()
