"""What of a name is taken out of a prompt, and what stays code."""

import pytest

from grader.models.prompts import without_names

FULL = ("Jane Doe", "Doe Jane", "4711", "jane@example.edu")
CANVAS = ("doejane", "12345")


@pytest.mark.parametrize("names", [FULL, CANVAS])
@pytest.mark.parametrize(
    "text", ["By Jane Doe", "JANE DOE", "jane doe", "Doe, Jane", "# jane_doe", "Jane", "JANE", "By Doe.", "doejane"]
)
def test_a_name_goes(names: tuple[str, ...], text: str) -> None:
    left = without_names(text, names).lower()
    assert "[student]" in left
    assert "jane" not in left
    assert "doe" not in left


@pytest.mark.parametrize("text", ["by jane", "# jane, 2026", "**jane**", "jane. And then", "(jane)"])
def test_a_lone_first_name_goes_where_it_is_no_code(text: str) -> None:
    assert "jane" not in without_names(text, FULL)


def test_canvas_joins_more_than_two_words_and_drops_accents() -> None:
    assert without_names("By Mary-Ann Do\u00eb.", ("doemaryann",)) == "By [student]."


@pytest.mark.parametrize(
    "code", ["y = max(sales)", "MAX = 3", "the max of all", "df['price']", "price = 2", "f(price)", "df.price.mean()"]
)
@pytest.mark.parametrize("names", [("Max Price",), ("Price Max", "pricemax"), ("max", "price")])
def test_words_that_are_code_stay(code: str, names: tuple[str, ...]) -> None:
    assert without_names(code, names) == code


def test_no_code_of_a_rare_name_changes() -> None:
    for code in ("df['jane']", "jane = 2", "f(jane)", "df.jane.mean()", "janet = 1"):
        assert without_names(code, FULL) == code


def test_a_piece_loses_the_same_as_the_whole() -> None:
    """A quote of the prompt is looked for in the cell that it is from."""
    cells = ["By Jane Doe", "I, Jane, think", "JANE says\njane too"]
    for names in (FULL, CANVAS):
        assert without_names("\n".join(cells), names) == "\n".join(without_names(cell, names) for cell in cells)
