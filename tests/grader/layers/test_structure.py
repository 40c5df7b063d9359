"""Layer 1: structure found by parsing."""

from decimal import Decimal
from typing import Any

import pytest

from grader.layers import Submission, check_items, submission_flags
from grader.rubric import load_rubric
from grader.verdicts import Verdict
from tests.support.notebooks import code, failed, notebook, printed, result, text


def verdict_on(check: str, *cells: dict[str, Any], language: str = "python", more: str = "", **parts: Any) -> Verdict:
    rubric = load_rubric(f"{{assignment: a, items: [{{id: x, title: X, points: 10, check: {check}{more}}}]}}")
    return check_items(rubric, Submission(notebook=notebook(*cells, language=language), **parts))[0]


VARIABLES = "{kind: variables, names: [total, mean]}"


def test_variables_earn_in_parts_with_evidence() -> None:
    verdict = verdict_on(VARIABLES, text("# A"), code("x = 1\ntotal = 2"))
    assert verdict.points == 5
    assert (verdict.status, verdict.layer) == ("partial", "structure")
    assert verdict.reason == "1 of 2 variables found. Missing: mean."
    assert (verdict.evidence[0].cell, verdict.evidence[0].line, verdict.evidence[0].quote) == (1, 2, "total = 2")


@pytest.mark.parametrize(
    ("language", "source"),
    [
        ("python", "# total = 1; mean = 2\ns = 'total = 1\\nmean = 2'"),
        ("python", '"""\ntotal = 1\nmean = 2\n"""'),
        ("python", "def f():\n    total = mean = 1"),
        ("python", "if 0:\n    total = mean = 1"),
        ("python", "total == 1; mean"),
        ("r", '# total <- 1\ns <- "mean <- 2; total <- 1"'),
        ("r", "f <- function() { total <- 1; mean <- 2 }"),
        ("r", "g(total = 1, mean = 2)"),
    ],
)
def test_names_in_comments_strings_and_functions_earn_nothing(language: str, source: str) -> None:
    assert verdict_on(VARIABLES, code(source), language=language).points == 0


def test_name_in_markdown_earns_nothing() -> None:
    assert verdict_on(VARIABLES, text("total = 1, mean = 2")).points == 0


def test_functions_with_equivalents() -> None:
    check = "{kind: functions, names: [filter, mean], equivalents: {filter: [subset]}}"
    assert verdict_on(check, code("subset(df, a > 1)\nmean(x)"), language="r").status == "earned"
    assert verdict_on("{kind: functions, use: define, names: [f]}", code("f(1)")).status == "not_earned"
    assert verdict_on("{kind: functions, use: define, names: [f]}", code("def f(): pass")).status == "earned"


def test_columns_in_code_or_in_a_table() -> None:
    check = "{kind: columns, names: [revenue, share]}"
    table = "<table><thead><tr><th></th><th>share</th></tr></thead><tbody><tr><th>0</th><td>1</td></tr></tbody></table>"
    assert verdict_on(check, code("df['revenue']", result("..", text_html=table))).status == "earned"
    assert verdict_on(check, code("print('revenue share')")).points == 0


def test_sections_and_their_code() -> None:
    cells = [text("## 1. Load Data"), code("x"), text("## Model"), code("y", failed("E", "no"))]
    assert verdict_on("{kind: sections, names: [load data, model]}", *cells).status == "earned"
    assert verdict_on("{kind: sections, names: [load data, model], need_code: true}", *cells).points == 5
    assert verdict_on("{kind: sections, names: [load data]}", code("# Load data")).points == 0


def test_where_limits_the_search() -> None:
    cells = [text("# A"), code("total = mean = 1"), text("# B"), code("x = 1")]
    check = "{kind: variables, names: [total], where: {section: B}}"
    verdict = verdict_on(check, *cells)
    assert verdict.points == 0
    assert verdict.reason == '0 of 1 variables found in section "B". Missing: total.'


def test_ran_counts_cells_in_parts() -> None:
    ran = "{kind: ran}"
    assert verdict_on(ran, code("a"), code("b"), code("")).status == "earned"
    assert verdict_on(ran, code("a"), code("b", count=None)).points == 5
    assert verdict_on(ran, code("a", count=2), code("b", count=1)).points == 5
    assert verdict_on("{kind: ran, in_order: false}", code("a", count=2), code("b", count=1)).points == 10
    assert verdict_on("{kind: ran, all_or_nothing: true}", code("a"), code("b", count=None)).points == 0
    assert verdict_on(ran, text("no code")).points == 0


def test_cells_without_work_buy_nothing_back() -> None:
    solution = notebook(code("a"), code("b"))
    fails = code("a", failed("ValueError", "x"))
    assert verdict_on("{kind: ran}", fails, code("b"), solution=solution).points == 5
    assert verdict_on("{kind: ran}", fails, *[code("1")] * 8, solution=solution).points == 5


def test_r_error_output_fails_its_cell_and_the_word_does_not() -> None:
    word = code("print('error')", printed("Error in lm: no error"), printed("Error: 3", "stderr"))
    fails = code("stop('x')", failed("ERROR", "Error in eval(expr): x"))
    assert verdict_on("{kind: ran}", word, language="r").status == "earned"
    verdict = verdict_on("{kind: ran}", word, fails, language="r")
    assert verdict.points == 5
    assert verdict.evidence[0].cell == 1
    assert "Error in eval" in verdict.evidence[0].quote


WORDS = "{kind: words, min_words: 4, questions: [Question 1, Question 2]}"


def test_reflections_are_counted_per_question() -> None:
    cells = [text("## Question 1\nOne two three four."), text("## Question 2\nToo short.")]
    verdict = verdict_on(WORDS, *cells)
    assert verdict.points == 5
    assert "Question 1: 4, Question 2: 2" in verdict.reason
    assert verdict.evidence[0].quote == "One two three four."


def test_reflections_after_bold_questions() -> None:
    assert verdict_on(WORDS, text("**Question 1:** One two three four.\n\n**Question 2:** a b c d")).points == 10


def test_words_of_the_template_and_of_comments_do_not_count() -> None:
    given = text("## Question 1\nWhat did you learn from this?\n## Question 2\n")
    answer = text("## Question 1\nWhat did you learn from this?\n<!-- a b c d -->\n## Question 2\na b c d e")
    assert verdict_on(WORDS, answer, template=notebook(given)).points == 5


def test_padding_is_flagged() -> None:
    verdict = verdict_on("{kind: words, min_words: 40}", text("very " * 50))
    assert [flag.code for flag in verdict.flags] == ["repeated_words"]


def test_credit_rules_take_code_only() -> None:
    rule = ", credit_rules: [{when: regex, patterns: ['sum\\('], multiplier: 0.5, explanation: sum is there}]"
    verdict = verdict_on(VARIABLES, code("sum(x)"), more=rule)
    assert verdict.points == 5
    assert verdict.status == "partial"
    assert "Partial credit: sum is there" in verdict.reason
    assert verdict_on(VARIABLES, code("# sum(x)"), more=rule).points == 0


def test_credit_rule_of_absence_needs_code() -> None:
    rule = ", credit_rules: [{when: not_regex, patterns: [hardcoded], multiplier: 0.5}]"
    assert verdict_on(VARIABLES, code("x = 1"), more=rule).points == 5
    assert verdict_on(VARIABLES, more=rule).points == 0


def test_deduction_takes_points_when_it_holds() -> None:
    verdict = verdict_on("{kind: functions, names: [eval]}", code("eval('1')"), more=", deduction: true")
    assert verdict.points == verdict.max_points == -10
    assert verdict.status == "not_earned"
    assert verdict_on("{kind: functions, names: [eval]}", code("1"), more=", deduction: true").points == 0


def test_model_and_manual_items_wait_for_review() -> None:
    for check in ("{kind: model, question: Is it clear}", "{kind: manual}"):
        verdict = verdict_on(check, code("x"))
        assert verdict.status == "needs_review"
        assert [verdict.points, verdict.pending] == [Decimal(0), Decimal(10)]


def test_unreadable_file_has_no_points() -> None:
    from grader.notebook import read_notebook

    rubric = load_rubric("{assignment: a, items: [{id: x, title: X, points: 10, check: {kind: ran}}]}")
    verdict = check_items(rubric, Submission(notebook=read_notebook(b"pdf", "x")))[0]
    assert verdict.points == Decimal(0)
    assert "not JSON" in verdict.reason


@pytest.mark.parametrize(
    ("source", "flagged"),
    [
        ("import builtins\nbuiltins.AssertionError = Warning", True),
        ("__builtins__.print = None", True),
        ("class Quiet(Exception): pass\nAssertionError = Quiet", True),
        ("import numpy\nnumpy.testing.assert_allclose = lambda *a: None", True),
        ("sys.excepthook = print", True),
        ("assert total == 3\nnumpy.testing.assert_allclose(a, b)", False),
        ("try: f()\nexcept AssertionError: print('builtins')", False),
    ],
)
def test_patched_assertions_are_flagged(source: str, flagged: bool) -> None:
    flags = submission_flags(Submission(notebook=notebook(code(source))))
    assert [flag.code for flag in flags] == (["tampering"] if flagged else [])


def test_cells_that_ran_are_the_evidence_of_it() -> None:
    """Cells that ran, at their first line with code."""
    verdict = verdict_on("{kind: ran}", text("# A"), code("\nx = 1"), *(code(f"x = {n}") for n in range(9)))
    assert verdict.points == 10
    assert [(one.cell, one.line, one.quote) for one in verdict.evidence][:2] == [(1, 2, "x = 1"), (2, 1, "x = 0")]
    assert len(verdict.evidence) == 5
