"""`agreement`: the machine's points beside a human's."""

from pathlib import Path

import msgspec
from rich.table import Table

from grader.agreement import FEWEST, Agreement, given_by_hand, pilot_report, read_hand_grades
from grader.cli.options import open_book
from grader.cli.show import console, table
from grader.errors import GraderError
from grader.grading import grades
from grader.texts import read_text


def show_agreement(book: Path, name: str, by_hand: Path | None, as_json: bool) -> None:
    database, assignment = open_book(book, name)
    found = grades(database, assignment)
    human = read_hand_grades(read_text(by_hand)) if by_hand else given_by_hand(found)
    report = pilot_report(found, human)
    if not report.submissions:
        raise GraderError(
            "no submission has points of a human: set them with `disagg-grade review PSEUDONYM --item ID --points P"
            " --why TEXT`, or give a table with --by-hand"
        )
    if as_json:
        print(msgspec.json.encode(report).decode())
        return
    out = console()
    out.print(_table(report.items, report.totals, report.bands))
    out.print("bias: machine minus you, in points; leniency: share in which the machine gave more, minus less")
    if report.open_items:
        out.print(f"in no figure, because the machine has no number (they need review): {report.open_items} answers")
    if report.submissions < FEWEST:
        out.print(f"few submissions ({report.submissions}): grade at least {FEWEST} by hand before you trust this")


def _table(items: dict[str, Agreement], totals: Agreement, bands: dict[str, Agreement]) -> Table:
    made = table("of", "count", "exact", "within 1", "kappa", "ICC", "MAE", "bias", "leniency")
    rows = [
        *items.items(),
        ("the whole work", totals),
        *((f"work {name}", one) for name, one in bands.items() if one.count),
    ]
    for name, one in rows:
        made.add_row(
            name,
            str(one.count),
            _share(one.exact),
            _share(one.within_one),
            _number(one.kappa),
            _number(one.icc),
            _number(one.mean_error),
            _number(one.bias, "+"),
            _number(one.leniency, "+"),
        )
    return made


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _number(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.2f}"
