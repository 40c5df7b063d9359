"""Other rubric shapes become ours, and a human is told what to look at."""

import json
from typing import Any

import pytest

from grader.errors import GraderError, ImportRefused
from grader.notebook import Notebook, read_notebook
from grader.rubric import (
    CodeTests,
    Functions,
    Manual,
    Variables,
    Words,
    dump_rubric,
    import_assignment,
    import_rubric,
    import_text,
    load_rubric,
)
from tests.support.notebooks import code, notebook_bytes, result, text


def _valid(imported: Any) -> None:
    assert load_rubric(dump_rubric(imported.rubric)) == imported.rubric


def test_flat() -> None:
    made = import_rubric({"Load data": {"points": "10 pts", "description": "CSV"}, "Plot": {"points": 27.5}}, "hw1")
    _valid(made)
    assert made.shape == "flat"
    assert made.rubric.maximum == 37.5
    assert [item.id for item in made.rubric.items] == ["load-data", "plot"]
    assert made.rubric.items[0].guideline == "CSV"
    assert made.notes == ("2 items are graded by a human: give them a check or a question for the model.",)


@pytest.mark.parametrize("key", ["components", "rubric_categories"])
def test_components_with_levels(key: str) -> None:
    criteria = {
        "excellent": "all",
        "good": {"points": 8, "description": "most"},
        "needs_improvement": "little",
        "odd": "x",
    }
    made = import_rubric({key: [{"name": "Analysis", "points": 10, "criteria": criteria}], "total_points": 12}, "hw1")
    _valid(made)
    levels = {level.name: float(level.share) for level in made.rubric.items[0].levels}
    assert levels == {"excellent": 1, "good": 0.8, "needs_improvement": 0.5, "odd": 0}
    assert "total_points is 12, but the items have 10 points." in made.notes
    assert "Analysis: level `odd` has no known share of the points: it got 0." in made.notes


def test_elements_by_weight() -> None:
    elements = {"a_b": {"weight": 1, "criteria": ["x"], "deductions": {"late": -2}}, "c": {"weight": 2}}
    made = import_rubric({"assignment_info": {"title": "HW", "total_points": 125}, "rubric_elements": elements}, "hw1")
    _valid(made)
    assert [str(item.points) for item in made.rubric.items] == ["41.67", "83.33"]
    assert "Deductions:\nlate: -2" in made.rubric.items[0].guideline


def test_elements_with_automatic_checks() -> None:
    data = {
        "assignment_info": {"total_points": 37.5},
        "rubric_elements": {"technical": {"max_points": 30}, "style": {"max_points": 7.5}},
        "autograder_checks": {
            "required_variables": ["df"],
            "sections": {
                "part1": {
                    "name": "Import",
                    "points": 20,
                    "variables": ["df", "n"],
                    "functions": ["read_csv"],
                    "function_equivalents": {"read_csv": ["read.csv"]},
                },
                "part2": {"name": "Reflection", "points": 10, "reflection_questions": 2, "min_words_per_question": 30},
            },
        },
        "partial_credit_rules": [
            {"condition_type": "regex", "pattern": "read", "multiplier": 0.5, "priority": 2, "explanation": "reads"},
            {"condition_type": "magic"},
        ],
    }
    made = import_rubric(data, "hw1")
    _valid(made)
    assert made.shape == "autograder_checks"
    assert made.rubric.maximum == 37.5
    kinds = [type(item.check) for item in made.rubric.items]
    assert kinds == [Variables, Functions, Words, Manual]
    assert made.rubric.items[0].credit_rules[0].explanation == "reads"
    reflection = made.rubric.items[2].check
    assert isinstance(reflection, Words)
    assert reflection.questions == ("Question 1", "Question 2")
    assert "A partial credit rule of type `magic` was left out" in made.notes[0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([1], "a rubric is a mapping"),
        ({"x": 1}, "none of the known shapes"),
        ({"A": {"points": "many"}}, "`many` is no number of points"),
        ({"components": [3]}, "is no mapping"),
        ({"rubric_elements": {"a": {}}}, "every rubric element needs `max_points`, or every one a `weight`"),
        ({"components": []}, "none of the known shapes"),
    ],
)
def test_other_data_is_refused(data: Any, message: str) -> None:
    with pytest.raises(ImportRefused, match=message):
        import_rubric(data, "hw1")


def _graded(source: str, **data: Any) -> dict[str, Any]:
    cell = code(source) if data.get("grade_id", "").startswith("test") else text(source)
    return {**cell, "metadata": {"nbgrader": {"schema_version": 3, **data}}}


def test_nbgrader_metadata() -> None:
    cells = [
        _graded(
            "assert 1\n### BEGIN HIDDEN TESTS\nassert 2\n### END HIDDEN TESTS", grade_id="test_a", grade=True, points=2
        ),
        _graded("essay", grade_id="b", grade=True, solution=True, points=1.5),
        _graded("solution", grade_id="c", grade=False, solution=True),
        _graded("x", grade_id="test_d", grade=True, points=0),
    ]
    made = import_assignment(read_notebook(notebook_bytes(*cells), "x"), "ps1")
    _valid(made)
    first, second = made.rubric.items
    assert isinstance(first.check, CodeTests)
    assert first.check.hidden
    assert first.check.code == "assert 1\n\nassert 2\n"
    assert first.check.after_cell == "test_a"
    assert isinstance(second.check, Manual)
    assert made.rubric.rerun
    assert made.notes == ("Cell 4 (`test_d`) has no points: it was left out.",)


def _raw(source: str) -> dict[str, Any]:
    return {"cell_type": "raw", "metadata": {}, "source": source}


def _otter() -> Notebook:
    cells = [
        _raw("# ASSIGNMENT CONFIG\nrequirements: r.txt"),
        _raw("# BEGIN QUESTION\nname: q1\npoints: 3"),
        _raw("# BEGIN SOLUTION"),
        code("square = lambda x: x * x"),
        _raw("# END SOLUTION"),
        _raw("# BEGIN TESTS"),
        code("square(2)", result("4")),
        code("# HIDDEN\nassert square(3) == 9"),
        _raw("# END TESTS"),
        _raw("# END QUESTION"),
        _raw("# BEGIN QUESTION\nname: q2\nmanual: true\npoints: 2"),
        _raw("# END QUESTION"),
    ]
    return read_notebook(notebook_bytes(*cells), "x")


def test_otter_raw_cells() -> None:
    made = import_assignment(_otter(), "lab")
    _valid(made)
    assert made.shape == "otter"
    assert [(item.title, str(item.points)) for item in made.rubric.items] == [
        ("q1 test 1", "1.50"),
        ("q1 test 2", "1.50"),
        ("q2", "2"),
    ]
    tests = [item.check for item in made.rubric.items[:2]]
    assert isinstance(tests[0], CodeTests)
    assert isinstance(tests[1], CodeTests)
    assert tests[0].code == "assert repr(square(2)) == '4'"
    assert tests[1].hidden


def test_other_notebooks_are_refused() -> None:
    with pytest.raises(ImportRefused, match="neither nbgrader's metadata nor otter's raw cells"):
        import_assignment(read_notebook(notebook_bytes(code("x")), "x"), "lab")


def test_a_file_becomes_the_text_of_a_rubric() -> None:
    ours = "# mine\nassignment: a\nitems: [{id: x, pionts: 1}]\n"
    assert import_text("mine.yaml", b"\xef\xbb\xbf" + ours.encode()).text == ours, "as it is, with its mistakes"
    flat = import_text("points.json", b'{"Plot": {"points": 2}}')
    assert load_rubric(flat.text).items[0].id == "plot"
    assert "1 items are graded by a human" in flat.notes[0]
    cell = _graded("assert x == 1", grade=True, grade_id="test-x", points=2, solution=False)
    notebook = import_text("ps1.ipynb", notebook_bytes(cell))
    assert isinstance(load_rubric(notebook.text).items[0].check, CodeTests)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.json", b"\xff\xfe", "no text in UTF-8"),
        ("a.yaml", b"- 1\n", "a rubric is a mapping"),
        ("a.yaml", b"a: *b\n", "Not valid YAML"),
        (
            "a.yaml",
            b"a: &a [1,1,1,1,1,1,1,1,1]\n" + b"".join(b"a%d: [*a,*a,*a,*a]\n" % n for n in range(9000)),
            "more than 50000 values",
        ),
        ("a.ipynb", b"{", "JSON"),
        ("a.ipynb", notebook_bytes(code("1")), "neither nbgrader's metadata nor otter's"),
        ("a.yaml", bytes(21 << 20), "more than 20 MiB"),
    ],
)
def test_files_of_no_known_shape_are_refused(name: str, content: bytes, why: str) -> None:
    with pytest.raises(GraderError, match=why):
        import_text(name, content)


def _checked(checks: dict[str, Any]) -> dict[str, Any]:
    return {"rubric_elements": {"e": {"points": 1}}, "autograder_checks": checks}


@pytest.mark.parametrize(
    "data",
    [
        {"rubric_categories": {"points": 1}},
        {"components": [{"name": "a", "points": 1, "criteria": {"good": {"points": "many"}}}]},
        _checked({"sections": {"s": {"points": 1, "reflection_questions": ["q"], "min_words_per_question": [1]}}}),
        _checked({}) | {"partial_credit_rules": [{"condition_type": "regex", "pattern": "x", "multiplier": "half"}]},
        {"assignment": "a", "items": [], "late": [1]},
    ],
)
def test_files_of_broken_shapes_are_refused(data: object) -> None:
    """Without a traceback, whatever stands where a number or a mapping should be."""
    with pytest.raises(GraderError):
        load_rubric(import_text("r.json", json.dumps(data).encode()).text)
