"""Feedback that contradicts points or evidence is flagged; points stay."""

from decimal import Decimal
from typing import Any

import msgspec
import pytest

from grader.models import Feedback, Improvement, Reflection, Strength, contradictions, unfounded
from grader.rubric import load_rubric
from grader.scoring import Component, Score
from grader.verdicts import Status, Verdict
from tests.support.notebooks import code, notebook, printed, text

_RUBRIC = load_rubric("""
assignment: a
items:
  - {id: mean, title: M, points: 4, check: {kind: output, where: {variable: mean}}}
  - {id: thoughts, title: T, points: 4, check: {kind: words, min_words: 5}}
  - {id: more-thoughts, title: T, points: 4, check: {kind: words, min_words: 50}}
""")
_FEEDBACK = Feedback(
    strengths=(Strength("general", "Clear."),),
    improvements=(),
    reflection=Reflection("thin", "Say more."),
    overall="good",
    instructor_comment="",
)


def _verdict(status: Status, item: str = "mean") -> Verdict:
    points = Decimal(4 if status == "earned" else 0)
    return Verdict(item_id=item, status=status, points=points, max_points=Decimal(4), reason="r", layer="outputs")


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
    flags = contradictions(feedback, _RUBRIC, (_verdict(status),), _score(percent))
    assert [flag.code for flag in flags] == ["feedback_contradicts"]
    assert says in flags[0].message


def test_feedback_that_fits_is_not_flagged() -> None:
    feedback = msgspec.structs.replace(_FEEDBACK, strengths=(Strength("mean", "You used 3 of the 4 regions."),))
    assert contradictions(feedback, _RUBRIC, (_verdict("earned"),), _score(80)) == ()


@pytest.mark.parametrize(
    ("quality", "first", "second", "says"),
    [
        ("deep", "not_earned", "not_earned", "calls the reflection deep; thoughts earned no points"),
        ("adequate", "not_earned", "not_earned", "calls the reflection adequate"),
        ("none", "earned", "not_earned", "finds no reflection; thoughts earned all its points"),
        ("deep", "earned", "not_earned", ""),  # it may be short
        ("deep", "needs_review", "not_earned", ""),
        ("thin", "earned", "earned", ""),  # many words that say little
        ("none", "not_earned", "not_earned", ""),
    ],
)
def test_the_reflection_and_its_words(quality: Any, first: Status, second: Status, says: str) -> None:
    feedback = msgspec.structs.replace(_FEEDBACK, reflection=Reflection(quality, "Say more."))
    verdicts = (_verdict("earned"), _verdict(first, "thoughts"), _verdict(second, "more-thoughts"))
    flags = contradictions(feedback, _RUBRIC, verdicts, _score(80))
    assert [flag.code for flag in flags] == ["feedback_contradicts"] * bool(says)
    assert not says or says in flags[0].message


_WORK = notebook(
    text("# Sales"),
    code("def total(data): return sum(data)\nmean_sales = total([1, 2]) / 2\nprint(mean_sales)", printed("1.5\n")),
    text("Jane Doe thinks."),
)


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ("Cell 4 is clear.", "speaks of cell 4; the work has 3"),
        ("See cell 0.", "cell 0"),
        ("Cells 1, 2 and 17 are clear.", "cell 17"),
        ("Your `median_sales` is clear.", "names `median_sales`, which the work does not have"),
        ("You call `total(prices)`.", "`total(prices)`"),
        ("You print `2.5`.", "`2.5`"),
        ("```\npandas.read_csv\n``` is a good start.", "pandas.read_csv"),
        ("Jane Doe is `Jane`.", "`Jane`"),  # the model has not seen this name
        ("Cells 1-3, 2 and 3, and cell 2 with 40 words: 17 are new.", ""),
        ("`total()` and `total( data )`, `mean_sales` and its `1.5`, in `# Sales`.", ""),
        ("`more-thoughts` is well done.", ""),  # an item of the rubric
        ("An excellent `` ` ``.", ""),
    ],
)
def test_what_the_work_does_not_have(said: str, says: str) -> None:
    praise = msgspec.structs.replace(_FEEDBACK, strengths=(Strength("general", said),))
    thought = msgspec.structs.replace(_FEEDBACK, reflection=Reflection("thin", said))
    for feedback in (praise, thought):
        found = unfounded(feedback, _RUBRIC, _WORK, ("Jane Doe",))
        assert len(found) == bool(says), found
        assert not says or says in found[0]
        flags = contradictions(feedback, _RUBRIC, (_verdict("earned"),), _score(80), found)
        assert [flag.message for flag in flags] == list(found)


def test_an_improvement_may_name_what_is_not_there() -> None:
    better = Improvement("general", "Use `statistics.mean`.", "b", "c", "`mean(data)`")
    assert not unfounded(msgspec.structs.replace(_FEEDBACK, improvements=(better,)), _RUBRIC, _WORK, ())
    lost = msgspec.structs.replace(better, how="Write cell 9 again.")
    assert unfounded(msgspec.structs.replace(_FEEDBACK, improvements=(lost,)), _RUBRIC, _WORK, ())
