"""One expected output against one output of the student: the share that matches."""

import math
from collections.abc import Sequence
from fractions import Fraction

import msgspec

from grader.layers.values import as_number, found_in_order, numbers_in, same_value, tokens_in
from grader.notebook import Cell, Output, Table, tables_in
from grader.rubric import OutputMatch

MAX_NUMBERS = 5_000


class Shown(msgspec.Struct, frozen=True):
    """What a reader sees of one cell's outputs."""

    text: str = ""
    tables: tuple[Table, ...] = ()
    images: int = 0
    cell: int | None = None

    @property
    def empty(self) -> bool:
        return not (self.text.strip() or self.tables or self.images)


def shown_by(outputs: Sequence[Output], cell: int | None = None) -> Shown:
    """Errors and stderr are not part of an answer."""
    seen = [output for output in outputs if output.kind != "error" and output.stream != "stderr"]
    text = "\n".join(output.text for output in seen if output.text)
    tables = tuple(table for output in seen for table in tables_in(output.html))
    return Shown(text, tables, sum(len(output.images) > 0 for output in seen), cell)


def shown_by_cell(cell: Cell) -> Shown:
    """A cell with an error output failed: it shows no answer."""
    return Shown(cell=cell.index) if cell.error is not None else shown_by(cell.outputs, cell.index)


def kind_of(expected: Shown, check: OutputMatch) -> str:
    if check.compare != "auto":
        return check.compare
    if expected.tables:
        return "table"
    if expected.images and not numbers_in(expected.text):
        return "image"
    return "number" if numbers_in(expected.text) else "text"


def lacks(want: Shown, check: OutputMatch) -> bool:
    """The rubric asks for numbers or a table, and the solution shows none: no answer could be right."""
    return (check.compare == "number" and not numbers_in(want.text)) or (check.compare == "table" and not want.tables)


def share_matching(have: Shown, want: Shown, check: OutputMatch) -> Fraction:
    kind = kind_of(want, check)
    if kind == "image":
        return Fraction(int(have.images > 0))
    if kind == "table":
        return _tables(have, want, check)
    return _numbers(have.text, want.text, check) if kind == "number" else _text(have.text, want.text, check)


def is_flood(have: Shown, want: Shown) -> bool:
    """So many numbers that the right ones may be among them by chance or by intent."""
    return len(numbers_in(have.text)) > 3 * len(numbers_in(want.text)) + 20


def _numbers(have: str, want: str, check: OutputMatch) -> Fraction:
    wanted = numbers_in(want)[:MAX_NUMBERS]
    if not wanted:
        return Fraction(0)
    return Fraction(found_in_order(numbers_in(have)[:MAX_NUMBERS], wanted, check), len(wanted))


def _text(have: str, want: str, check: OutputMatch) -> Fraction:
    a, b = tokens_in(have), tokens_in(want)
    same = len(a) == len(b) and all(same_value(x, y, check) for x, y in zip(a, b, strict=True))
    return Fraction(int(same))


def _tables(have: Shown, want: Shown, check: OutputMatch) -> Fraction:
    """Each expected table against the best of the student's; printed text counts when its values agree."""
    if not want.tables:
        return Fraction(0)
    shares = [max((_table(one, each, check) for one in have.tables), default=Fraction(0)) for each in want.tables]
    share = sum(shares, Fraction(0)) / len(shares)
    if share == 0 and not have.tables:
        return Fraction(int(_numbers(have.text, want.text, check) == 1 and _words_in(have.text, want.text)))
    return share


def _words_in(have: str, want: str) -> bool:
    words = {token.casefold() for token in tokens_in(have)}
    return all(token.casefold() in words for token in tokens_in(want) if as_number(token) is None)


def _table(have: Table, want: Table, check: OutputMatch) -> Fraction:
    """The share of the expected cells that agree. Columns are matched by name; more columns do no harm."""
    columns = [have.header.index(name) if name in have.header else None for name in want.header]
    rows = [tuple(row[i] if i is not None else None for i in columns) for row in have.rows]
    if len(rows) != len(want.rows) or not want.rows:
        return Fraction(0)
    wanted = list(want.rows)
    if check.ignore_row_order:
        first = int(len(want.header) > 1 and want.header[0] == "")  # the index of pandas says nothing then
        rows = sorted((row[first:] for row in rows), key=_order)
        wanted = sorted((row[first:] for row in wanted), key=_order)
    same = sum(
        one is not None and same_value(one, other, check)
        for row, expected in zip(rows, wanted, strict=True)
        for one, other in zip(row, expected, strict=True)
    )
    return Fraction(same, sum(len(row) for row in wanted) or 1)


def _order(row: Sequence[str | None]) -> list[tuple[bool, float, str]]:
    numbers = [None if (found := as_number(value or "")) is None or math.isnan(found) else found for value in row]
    return [
        (number is None, round(number, 6) if number is not None else 0, (value or "").casefold())
        for number, value in zip(numbers, row, strict=True)
    ]
