"""Layer 2: outputs against the solution's."""

from decimal import Decimal
from typing import Any

import pytest

from grader.layers import Submission, check_items
from grader.notebook import read_outputs, tables_in
from grader.rubric import CodeTests, Item, Rubric, load_rubric
from grader.sandbox import Rerun, TestResult
from grader.verdicts import Verdict
from tests.support.notebooks import code, failed, notebook, printed, result, text


def verdict_on(
    check: str, student: list[dict[str, Any]], solution: list[dict[str, Any]], language: str = "python"
) -> Verdict:
    rubric = load_rubric(
        f"{{assignment: a, items: [{{id: x, title: X, points: 10, check: {{kind: output, {check}}}}}]}}"
    )
    submission = Submission(
        notebook=notebook(*student, language=language), solution=notebook(*solution, language=language)
    )
    return check_items(rubric, submission)[0]


def html(*rows: tuple[object, ...], header: tuple[str, ...] = ("", "region", "revenue")) -> dict[str, Any]:
    head = "".join(f"<th>{name}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{value}</td>" for value in row) + "</tr>" for row in rows)
    return result("table", text_html=f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


TAG = "where: {tag: q1}"


def tagged(*outputs: dict[str, Any]) -> dict[str, Any]:
    return code("answer", *outputs, tags=("q1",))


@pytest.mark.parametrize(
    ("have", "want", "check", "points"),
    [
        ("Mean: 5.2", "the mean is 5.2", TAG, 10),
        ("5.2000001", "5.2", TAG, 10),
        ("5.3", "5.2", TAG, 0),
        ("5.3", "5.2", TAG + ", rel_tol: 0.05", 10),
        ("1,234.5", "1234.5", TAG, 10),
        ("np.float64(5.2)", "5.2", TAG, 10),
        ("5.2 and 7", "5.2 and 8", TAG, 0),
        ("5.2 and 7", "5.2 and 8", TAG + ", partial: true", 5),
        ("8 5.2", "5.2 8", TAG, 0),
        ("Yes,  it is", "yes it IS", TAG, 10),
        ("no", "yes", TAG, 0),
        ("YES", "yes", TAG + ", ignore_case: false", 0),
        ("", "5", TAG, 0),
        ("mean: nan", "nan", TAG, 10),
        ("mean: 0", "nan", TAG, 0),
        ("nan", "5", TAG + ", abs_tol: 100", 0),
        ("inf", "1e400", TAG, 10),
        ("-inf", "inf", TAG, 0),
        ("inf", "5", TAG + ", rel_tol: 0.5", 0),
        ("9" * 5000, "5", TAG, 0),
        ("nano information 5", "5", TAG, 10),
        ("5 nan", "5 inf", TAG, 0),
    ],
)
def test_numbers_and_text(have: str, want: str, check: str, points: int) -> None:
    assert verdict_on(check, [tagged(printed(have))], [tagged(printed(want))]).points == points


def test_reasons_and_evidence() -> None:
    verdict = verdict_on(TAG, [text("# A"), tagged(printed("5.3"))], [tagged(printed("5.2"))])
    assert verdict.reason == 'The output tagged "q1" differs from the solution\'s (number; 0 of 1 outputs match).'
    assert (verdict.evidence[0].cell, verdict.evidence[0].quote, verdict.evidence[0].part) == (1, "5.3", "output")
    assert verdict.layer == "outputs"
    lost = verdict_on(TAG, [code("x", printed("5"))], [tagged(printed("5"))])
    assert lost.reason == 'There is no output tagged "q1".'
    assert [flag.message for flag in lost.flags] == ['The notebook has code, but no code cell tagged "q1".']


def test_flood_of_numbers_goes_to_a_human() -> None:
    verdict = verdict_on(TAG, [tagged(printed(" ".join(map(str, range(1000)))))], [tagged(printed("512"))])
    assert verdict.status == "needs_review"
    assert [verdict.points, verdict.pending] == [Decimal(0), Decimal(10)]
    assert [flag.code for flag in verdict.flags] == ["many_numbers"]


def test_solution_without_output_goes_to_a_human() -> None:
    verdict = verdict_on(TAG, [tagged(printed("5"))], [code("x")])
    assert verdict.status == "needs_review"
    assert "The solution has no output" in verdict.reason


@pytest.mark.parametrize("kind", ["number", "table"])
def test_a_solution_that_shows_nothing_of_the_kind_goes_to_a_human(kind: str) -> None:
    found = verdict_on(f"{TAG}, compare: {kind}", [tagged(printed("done"))], [tagged(printed("done"))])
    assert found.status == "needs_review"
    assert found.points == 0
    assert f"no {kind} to compare with" in found.reason


def test_expected_text_needs_no_solution() -> None:
    assert verdict_on(TAG + ", expected: '42'", [tagged(printed("42"))], []).points == 10


SECTION = "where: {section: Means}"
ANSWER = [text("# Means"), code("m", printed("5.2")), text("# Other"), code("o", printed("7"))]


@pytest.mark.parametrize("position", range(5))
def test_one_inserted_cell_changes_nothing(position: int) -> None:
    for extra in (code("z = 0"), code("print(99)", printed("99")), text("a remark")):
        shifted = [*ANSWER[:position], extra, *ANSWER[position:]]
        for section in ("Means", "Other"):
            assert verdict_on(f"where: {{section: {section}}}", shifted, ANSWER).points == 10


def test_right_number_in_the_wrong_section_earns_nothing() -> None:
    wrong = [text("# Means"), code("m", printed("7")), text("# Other"), code("o", printed("5.2"))]
    assert verdict_on(SECTION, wrong, ANSWER).points == 0


def test_variable_is_matched_where_it_is_shown() -> None:
    check = "where: {variable: avg}"
    solution = [code("avg = mean(x)"), code("avg", result("5.2"))]
    assert (
        verdict_on(
            check, [code("avg = 1\nother"), code("print('Average', avg)", printed("Average 5.2"))], solution
        ).points
        == 10
    )
    assert verdict_on(check, [code("other", result("5.2"))], solution).points == 0


def test_cell_with_an_error_shows_no_answer() -> None:
    solution = [tagged(printed("5.2"))]
    assert verdict_on(TAG, [tagged(printed("5.2"), failed("ERROR", "Error in f"))], solution, "r").points == 0
    assert verdict_on(TAG, [tagged(printed("[1] 5.2 error"))], solution, "r").points == 10


NORTH, SOUTH = (0, "north", 10.5), (1, "south", 20.25)


def test_tables_by_column_name() -> None:
    want = [tagged(html(NORTH, SOUTH))]
    assert verdict_on(TAG, [tagged(html(NORTH, SOUTH))], want).points == 10
    swapped = html((10.5, 0, "north"), (20.25, 1, "south"), header=("revenue", "", "region"))
    assert verdict_on(TAG, [tagged(swapped)], want).points == 10
    assert verdict_on(TAG, [tagged(html(NORTH, (1, "south", 20.3)))], want).points == 0
    part = verdict_on(TAG + ", partial: true", [tagged(html(NORTH, (1, "south", 20.3)))], want)
    assert part.points == Decimal("8.33")
    assert verdict_on(TAG, [tagged(html(NORTH))], want).points == 0


def test_row_order_may_be_ignored() -> None:
    have, want = [tagged(html((0, "south", 20.25), (1, "north", 10.5)))], [tagged(html(NORTH, SOUTH))]
    assert verdict_on(TAG, have, want).points == 0
    assert verdict_on(TAG + ", ignore_row_order: true", have, want).points == 10


def test_image_counts_as_present_only() -> None:
    picture = {"output_type": "display_data", "data": {"image/png": "AAAA", "text/plain": "<Figure>"}, "metadata": {}}
    other = {"output_type": "display_data", "data": {"image/png": "BBBB"}, "metadata": {}}
    assert verdict_on(TAG, [tagged(other)], [tagged(picture)]).points == 10
    assert verdict_on(TAG, [tagged(printed("plot"))], [tagged(picture)]).points == 0


def test_tables_of_pandas_and_irkernel() -> None:
    pandas = (
        '<table border="1"><thead><tr><th></th><th>revenue</th></tr><tr><th>region</th><th></th></tr></thead>'
        "<tbody><tr><th>north</th><td>10.5</td></tr></tbody></table>"
    )
    r = (
        '<table class="dataframe"><thead><tr><th scope=col>region</th><th scope=col>revenue</th></tr>'
        "<tr><th scope=col>&lt;chr&gt;</th><th scope=col>&lt;dbl&gt;</th></tr></thead>"
        "<tbody><tr><td>north</td><td>10.5</td></tr></tbody></table>"
    )
    assert tables_in(pandas) == tables_in(r)
    assert tables_in(r)[0].header == ("region", "revenue")


def test_a_table_that_a_page_shows_is_quoted_as_text() -> None:
    """Python writes `<IPython.core.display.HTML object>` of it, which is no evidence for anybody."""
    table = "<table><tr><th>region</th><th>revenue</th></tr><tr><td>north</td><td>10.5</td></tr></table>"
    data = {"text/html": table, "text/plain": "<IPython.core.display.HTML object>"}
    shown = code("display(HTML(page))", {"output_type": "display_data", "data": data, "metadata": {}}, tags=("t",))
    verdict = verdict_on("where: {tag: t}, compare: table", [shown], [shown])
    assert [one.quote for one in verdict.evidence] == ["region | revenue\nnorth | 10.5"]


def _tested(
    test: str, result: TestResult, *cells: dict[str, Any], hidden: bool = False, language: str = "python"
) -> Verdict:
    check = CodeTests(code=test, hidden=hidden, after_cell="test_mean")
    rubric = Rubric(assignment="a", items=(Item(id="x", title="X", points=Decimal(10), check=check),))
    work = notebook(*cells, language=language)
    rerun = Rerun(notebook=work, status="finished", backend="", tests={"x": result})
    return check_items(rubric, Submission(notebook=work, rerun=rerun))[0]


@pytest.mark.parametrize(
    ("language", "source", "test"),
    [
        ("python", "def mean(x):\n    return 2", "assert mean([1, 3]) == 2"),
        ("r", "mean <- function(x) {\n  2\n}", "stopifnot(mean(c(1, 3)) == 2)"),
    ],
)
def test_the_evidence_of_tests_is_what_they_test(language: str, source: str, test: str) -> None:
    passed = _tested(test, TestResult(passed=True), code("x = 1"), code(source), language=language)
    assert passed.points == 10
    assert passed.reason == "The tests pass."
    assert [(one.cell, one.line, one.quote) for one in passed.evidence] == [(1, 1, source.splitlines()[0])]


def test_what_hidden_tests_say_is_no_evidence() -> None:
    """Evidence is in the student's report."""
    said = TestResult(passed=False, message="AssertionError: the secret 42")
    shown = _tested("assert mean == 42", said, code("mean = 1"))
    assert [one.quote for one in shown.evidence] == ["AssertionError: the secret 42", "mean = 1"]
    hidden = _tested("assert mean == 42", said, code("mean = 1"), hidden=True)
    assert (hidden.reason, [one.quote for one in hidden.evidence]) == ("Hidden tests fail.", ["mean = 1"])


def test_the_evidence_of_a_value_that_no_cell_shows() -> None:
    """A re-run reads the variable at the end: its value, and the line that gave it."""
    rubric = load_rubric("""
assignment: a
items: [{id: x, title: X, points: 1, check: {kind: output, where: {variable: mean}, expected: "2.5"}}]
""")
    work = notebook(code("mean = 1"), code("a = 2\nmean = a + 0.5"))
    rerun = Rerun(notebook=work, status="finished", backend="", probes={"mean": read_outputs([result("2.5")])})
    verdict = check_items(rubric, Submission(notebook=work, rerun=rerun))[0]
    assert verdict.points == 1
    assert [(one.cell, one.line, one.quote) for one in verdict.evidence] == [
        (None, 0, "2.5"), (1, 2, "mean = a + 0.5"),
    ]  # fmt: skip
