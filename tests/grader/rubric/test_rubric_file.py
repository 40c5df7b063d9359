"""Rubric files: one schema, and every mistake with its line."""

import pytest

from grader.errors import RubricInvalid
from grader.rubric import changed_items, dump_rubric, item_hash, load_rubric, rubric_hash

GOOD = """\
assignment: hw1
total: 37.5
items:
  - id: vars
    title: Variables
    points: 12.5
    check: {kind: variables, names: [total]}
  - id: mean
    title: Mean
    points: 25
    check:
      kind: output
      where: {tag: q1}
      rel_tol: 0.01
caps:
  - {id: ran, at_most: 20, reason: The notebook does not run, unless: vars}
late: {per_day_percent: 10}
"""


def test_good_rubric() -> None:
    rubric = load_rubric(GOOD)
    assert rubric.maximum == rubric.total
    assert load_rubric(dump_rubric(rubric)) == rubric


def test_json_with_tabs_is_a_rubric() -> None:
    text = '{\n\t"assignment": "a",\n\t"items": [{"id": "x", "title": "X", "points": 0.1, "check": {"kind": "ran"}}]\n}'
    assert str(load_rubric(text).maximum) == "0.1"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("points: 12.5", "pionts: 12.5", "r.yaml:6:5: items[0].pionts: Unknown field `pionts`; did you mean `points`?"),
        ("points: 25", "points: many", "r.yaml:10:13: items[1].points: Not a number"),
        ("    title: Mean\n", "", "r.yaml:8:5: items[1]: Missing required field `title`"),
        (
            "kind: output",
            "kind: outputs",
            "r.yaml:12:13: items[1].check.kind: Invalid value 'outputs'. Kinds of check: col",
        ),
        ("names: [total]", "names: []", "r.yaml:7:37: items[0].check.names: The check needs at least one name."),
        (
            "names: [total]",
            "nmes: [total]",
            "r.yaml:7:30: items[0].check.nmes: Unknown field `nmes`; did you mean `names`?",
        ),
        ("where: {tag: q1}", "where: {}", "r.yaml:13:14: items[1].check.where: An output check needs a tag"),
        ("total: 37.5", "total: 40", "r.yaml:2:8: total: total is 40, but the items have 37.5 points."),
        ("id: mean", "id: vars", "r.yaml:8:9: items[1].id: The id `vars` is there 2 times."),
        ("id: mean", "id: a b", "r.yaml:8:9: items[1].id: `a b` is no id"),
        ("unless: vars", "unless: nothing", "r.yaml:16:71: caps[0].unless: There is no item `nothing`."),
        (
            "per_day_percent: 10",
            "per_day_percent: 110",
            "r.yaml:17:25: late.per_day_percent: per_day_percent is 0 to 100.",
        ),
        ("points: 25", "points: 25.001", "r.yaml:10:13: items[1].points: 25.001 is no multiple of point_step 0.01."),
        ("points: 25", "points: -25", "r.yaml:10:13: items[1].points: points must be more than 0"),
        ("rel_tol: 0.01", "rel_tol: -1", "r.yaml:14:16: items[1].check.rel_tol: A tolerance cannot be negative."),
        ("assignment: hw1", "assignment: [", "r.yaml:3:6: Not valid YAML or JSON"),
        ("total: 37.5", "assignment: 2", "r.yaml:2:1: assignment: This key is there twice."),
    ],
)
def test_mistakes_have_lines(old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(RubricInvalid) as caught:
        load_rubric(GOOD.replace(old, new), "r.yaml")
    assert message in str(caught.value)


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(RubricInvalid) as caught:
        load_rubric(GOOD.replace("points: 12.5", "pionts: 1").replace("points: 25", "points: many"), "r.yaml")
    assert [problem.line for problem in caught.value.problems] == [6, 10]


@pytest.mark.parametrize("text", ["", "[1]", "just words", "a: &a [*a]", "!!python/object:os.system x"])
def test_other_files_are_refused(text: str) -> None:
    with pytest.raises(RubricInvalid):
        load_rubric(text)


def test_letters_cover_every_percentage() -> None:
    with pytest.raises(RubricInvalid, match="The last letter starts at 0"):
        load_rubric(GOOD + "letters: [{letter: A, from_percent: 90}, {letter: C+, from_percent: 60}]\n")


def test_models_get_no_points_unless_the_rubric_says_so() -> None:
    judged = GOOD.replace("title: Mean", "title: Mean\n    ai_share: 0.5")
    with pytest.raises(RubricInvalid, match=r"The items give models 12.5 points; ai_share_max allows 0\."):
        load_rubric(judged)
    load_rubric(judged + "ai_share_max: 0.5\n")


def test_only_touched_items_are_graded_again() -> None:
    old = load_rubric(GOOD)
    assert changed_items(old, load_rubric(GOOD.replace("rel_tol: 0.01", "rel_tol: 0.02"))) == {"mean"}
    assert changed_items(old, load_rubric(GOOD.replace("title: Mean", "title: The mean"))) == set()
    assert changed_items(old, load_rubric(GOOD.replace("per_day_percent: 10", "per_day_percent: 20"))) == set()
    renamed = load_rubric(GOOD.replace("id: mean", "id: average"))
    assert changed_items(old, renamed) == {"average"}
    assert rubric_hash(old) != rubric_hash(renamed)
    assert item_hash(old, old.items[0]) == item_hash(renamed, renamed.items[0])


def test_a_mistake_of_one_kind_hides_none_of_another() -> None:
    text = """assignment: a
items:
  - {id: a, title: A, pionts: 1, check: {kind: manual}}
  - {id: b, title: B, points: -1, check: {kind: variables, names: []}}
late: {per_day_percent: ten}
"""
    with pytest.raises(RubricInvalid) as caught:
        load_rubric(text)
    assert [problem.line for problem in caught.value.problems] == [3, 4, 4, 5]


def test_every_mistake_of_one_item_is_told() -> None:
    text = """assignment: a
items:
  - id: a
    titel: A
    points: ten
    check: {kind: varables}
    late: 3
"""
    with pytest.raises(RubricInvalid) as caught:
        load_rubric(text, "r.yaml")
    assert [problem.line for problem in caught.value.problems] == [4, 5, 6, 7]


@pytest.mark.parametrize(
    "number", [".nan", ".inf", "-.inf", "NaN", "sNaN", "1e400000000", "1.0e+30", "0.0000000000000001"]
)
@pytest.mark.parametrize(
    ("old", "line"),
    [("37.5", 2), ("12.5", 6), ("at_most: 20", 16), ("per_day_percent: 10", 17), ("rel_tol: 0.01", 14)],
)
def test_numbers_that_are_none_are_refused_with_their_line(number: str, old: str, line: int) -> None:
    if old.startswith("rel_tol") and number.startswith("0."):
        return  # a tolerance may be tiny
    text = GOOD.replace(old, f"{old.rpartition(' ')[0]} {number}".strip(), 1)
    with pytest.raises(RubricInvalid) as caught:
        load_rubric(text)
    assert [problem.line for problem in caught.value.problems] == [line]


def test_no_part_hides_the_mistakes_of_another() -> None:
    """Shapes, numbers and rules, in items and around them, are told at once."""
    text = """assignment: a
point_step: 0
total: many
items:
  - id: a
    title: A
    points: .nan
    check: {kind: variables, names: 3, wheer: {tag: x}}
  - id: b c
    title: B
    points: 1
    levels:
      - {name: good, share: 2}
      - {nam: bad, share: one}
    check: {kind: output, where: {}, rel_tol: -1, compare: sound}
  - {id: c, title: C, points: -2, check: {kind: words, min_words: 0, where: {tag: 1, section: [2]}}}
caps:
  - {id: most, at_most: .inf, reason: x}
  - {id: other, at_most: -1, reason: ""}
late: {per_day_percent: 200, grace_minutes: long}
limits: {cpu_s: 0, memory_mib: much}
"""
    with pytest.raises(RubricInvalid) as caught:
        load_rubric(text, "r.yaml")
    assert {problem.path for problem in caught.value.problems} == {
        "point_step", "total", "items[0].points", "items[0].check.names", "items[0].check.wheer", "items[1].id",
        "items[1].levels[0].share", "items[1].levels[1].nam", "items[1].levels[1].share", "items[1].check.where",
        "items[1].check.rel_tol", "items[1].check.compare", "items[2].points", "items[2].check.min_words",
        "items[2].check.where.tag", "items[2].check.where.section", "caps[0].at_most", "caps[1].at_most",
        "caps[1].reason", "late.per_day_percent", "late.grace_minutes", "limits.cpu_s", "limits.memory_mib",
    }  # fmt: skip
