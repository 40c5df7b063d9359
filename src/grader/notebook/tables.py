"""Tables in HTML outputs, as pandas and IRkernel write them."""

from html.parser import HTMLParser

import msgspec

MAX_CELLS = 100_000


class Table(msgspec.Struct, frozen=True):
    """Text cells. The index column of pandas has an empty name."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class _TableParser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tables: list[tuple[list[list[str]], list[list[str]]]] = []  # header rows, rows
        self.row: list[str] | None = None
        self.text: list[str] | None = None
        self.in_head = False
        self.cells = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self.tables.append(([], []))
        elif tag in ("thead", "tbody"):
            self.in_head = tag == "thead"
        elif tag == "tr":
            self.row = []
        elif tag in ("td", "th") and self.row is not None:
            self.text = []

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th") and self.row is not None and self.text is not None and self.cells < MAX_CELLS:
            self.row.append(" ".join("".join(self.text).split()))
            self.text, self.cells = None, self.cells + 1
        elif tag == "tr" and self.row is not None and self.tables:
            head, rows = self.tables[-1]
            (head if self.in_head or (not head and not rows) else rows).append(self.row)
            self.row = None

    def handle_data(self, data: str) -> None:
        if self.text is not None:
            self.text.append(data)


def tables_in(html: str) -> tuple[Table, ...]:
    if "<table" not in html.lower():
        return ()
    parser = _TableParser()
    parser.feed(html)
    return tuple(_table(head, rows) for head, rows in parser.tables if head or rows)


def as_text(tables: tuple[Table, ...]) -> str:
    """Lines, as a person would read them aloud."""
    return "\n".join(" | ".join(row) for table in tables for row in (table.header, *table.rows))


def _table(head: list[list[str]], rows: list[list[str]]) -> Table:
    """Further header rows are pandas' name of the index, or IRkernel's types as `<dbl>`: the first has the columns."""
    columns = head[0] if head else []
    named = [name for row in head[1:2] for name in row if not name.startswith("<")]
    if columns and not columns[0] and any(named) and named[0]:
        columns = [named[0], *columns[1:]]
    width = max([len(columns), *(len(row) for row in rows)], default=0)
    pad = [""] * (width - len(columns))
    return Table(tuple(pad + columns), tuple(tuple([""] * (width - len(row)) + row) for row in rows))
