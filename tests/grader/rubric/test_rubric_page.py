"""docs/RUBRICS.md: its sample is a rubric, and it names every kind of check and field."""

import re
from pathlib import Path

import pytest

from grader.errors import RubricInvalid
from grader.rubric import Item, Rubric, load_rubric
from grader.rubric.checks import CHECK_KINDS

PAGE = (Path(__file__).parents[3] / "docs" / "RUBRICS.md").read_text()
SAMPLE = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0]


def test_sample_is_a_rubric() -> None:
    rubric = load_rubric(SAMPLE)
    assert rubric.maximum == 30
    assert len(rubric.items) == 5


def test_page_names_everything() -> None:
    names = {*CHECK_KINDS, *Item.__struct_fields__, *Rubric.__struct_fields__}
    missing = {name for name in names if not re.search(rf"\b{name}\b", PAGE)}
    assert missing <= {"version", "instructions"}


def test_shown_errors_are_the_real_ones() -> None:
    broken = "\n".join(["assignment: a", "total: 1", "items:", "  - id: a", "    title: A", "    pionts: 1"])
    check = "    check: {kind: variables, names: []}"
    for text in (f"{broken}\n{check}", f"{broken}\n{check}".replace("pionts", "points")):
        with pytest.raises(RubricInvalid) as caught:
            load_rubric(text, "rubric.yaml")
        assert str(caught.value).splitlines()[0] in PAGE
