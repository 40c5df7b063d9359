"""Names are found by parsing: never in comments, strings or dead code."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grader.code import code_facts, plain_code, r_tokens

PYTHON = """%matplotlib inline
# in_comment = 3
note = "in_string = 3"
df = pd.read_csv("sales.csv")
df["revenue"] = df.price * df["units"]
a, (b, *c) = 1, (2, 3)
def outer(x):
    local = df.groupby("region")["revenue"].mean()
    return local
double = lambda x: 2 * x
if False:
    dead = 1
print(f"mean {a}")
df.head()"""

R = """# in_comment <- 3
note <- "in_string <- 3"
df$revenue <- df$price * df[["units"]]
5 -> right
a <- b <- 3
outer <- function(x, n = 2) { local <- x; local }
double <- \\(x) 2 * x
by_region <- df %>% dplyr::group_by(region) %>% summarise(avg = mean(revenue, na.rm = TRUE))
if (FALSE) { dead <- 1 }
if (a > 2) { branch <- 1 }
print(a)
by_region
"""


def _names(source: str, language: str, fact: str) -> set[str]:
    return {use.name for use in code_facts(source, language).uses if use.fact == fact}


def test_python_names() -> None:
    assert _names(PYTHON, "python", "assign") == {"note", "df", "a", "b", "c", "double"}
    assert _names(PYTHON, "python", "define") == {"outer", "double"}
    assert {"read_csv", "pd.read_csv", "groupby", "mean", "head"} <= _names(PYTHON, "python", "call")
    assert _names(PYTHON, "python", "column") == {"revenue", "price", "units", "region"}
    assert _names(PYTHON, "python", "show") == {"a", "df"}


def test_r_names() -> None:
    assert _names(R, "r", "assign") == {"note", "df", "right", "a", "b", "outer", "double", "by_region", "branch"}
    assert _names(R, "r", "define") == {"outer", "double"}
    assert {"group_by", "dplyr::group_by", "summarise", "mean", "print"} == _names(R, "r", "call")
    assert {"revenue", "price", "units", "region", "avg"} <= _names(R, "r", "column")
    assert _names(R, "r", "show") == {"a", "by_region"}


@pytest.mark.parametrize(("language", "source"), [("python", PYTHON), ("r", R)])
def test_comments_and_strings_are_no_code(language: str, source: str) -> None:
    plain = plain_code(source, language)  # type: ignore[arg-type]
    assert "in_comment" not in plain
    assert "in_string" not in plain


def test_lines_are_those_of_the_cell() -> None:
    use = code_facts(PYTHON, "python").find("assign", "df")
    assert use is not None
    assert (use.line, use.quote) == (4, 'df = pd.read_csv("sales.csv")')


def test_broken_python_says_where() -> None:
    facts = code_facts("x = 1\ny = (", "python")
    assert facts.problem.startswith("SyntaxError")
    assert facts.problem_line == 2


@pytest.mark.parametrize("source", ["(" * 5000, "x" + ".a" * 50_000, "\x00", "-" * 100_000 + "1"])
def test_hostile_python_is_a_problem_not_a_crash(source: str) -> None:
    facts = code_facts(source, "python")
    assert facts.problem or not facts.find("assign", "x")


@pytest.mark.parametrize(
    "source", ["a<-" * 9000, "(\n" * 9000, "[" * 9000, "f(){" * 9000, "select(" * 6000, "x$" * 9000]
)
def test_hostile_r_is_read_in_one_pass(source: str) -> None:
    """Quadratic code would take minutes here."""
    code_facts(source, "r")


def test_r_raw_strings_and_backticks() -> None:
    assert [token.text for token in r_tokens('x <- r"(a " b)"; `my var` <- 1')] == [
        "x",
        "<-",
        'a " b',
        ";",
        "my var",
        "<-",
        "1",
    ]


@given(st.text())
def test_any_text_is_tokens(source: str) -> None:
    list(r_tokens(source))
    code_facts(source, "r")
    code_facts(source, "python")
    plain_code(source, "python")
