"""The targets of `disagg top`: goals, measured values and whether they are met, as the gateway computed them."""

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from disaggregated_inference.api import Target
from disaggregated_inference.cli.screen import one_line
from disaggregated_inference.cli.top_table import NONE

TargetRow = tuple[Text, Text, Text, Text]  # by _HEADS

_HEADS = ("target", "goal", "measured", "met")
_UNITS = {"%": "%", "s": "s", "x": "x"}  # of the others, the name says it
_MET = {True: Text("yes", "green"), False: Text("no", "red"), None: Text(NONE)}
_WORDS = {True: "met", None: "not known", False: "not met"}
_GAP = 2  # between blocks


def targets_part(targets: Sequence[Target], width: int, room: int) -> tuple[RenderableType | None, int]:
    """All of them, in blocks side by side; or one line that counts them, where that would take more than `room`."""
    if not targets or room < 1:
        return None, 0
    rows = [_row(target) for target in targets]
    for count in range(len(rows), 0, -1):
        blocks = _blocks(rows, count)
        if sum(map(_width, blocks)) + _GAP * (len(blocks) - 1) <= width:
            lines = len(blocks[0]) + 1
            return (_table(blocks), lines) if lines <= room else (_counted(targets), 1)
    return _counted(targets), 1


def _row(target: Target) -> TargetRow:
    goal, unit = target.goal, target.unit
    sign = "<" if target.better == "lower" else ">"
    measured = NONE if target.measured is None else _value(target.measured, unit, goal)
    return Text(_name(target)), Text(f"{sign}{_value(goal, unit, None)}"), Text(measured), _MET[target.met]


def _name(target: Target) -> str:
    return one_line(target.name).replace("_", " ").capitalize().replace("kwh", "kWh")


def _value(value: float, unit: str, goal: float | None) -> str:
    """A value that is not the goal, or not 100 %, is not rounded to it."""
    limits = [limit for limit in (goal, 100 if unit == "%" else None) if limit is not None and limit != value]
    digits = next((each for each in range(3, 8) if float(f"{value:.{each}g}") not in limits), 8)
    text = f"{float(f'{value:.{digits}g}'):,.6f}".rstrip("0").rstrip(".")
    if unit == "$":
        return "<$0.000001" if 0 < value < 1e-6 else f"${text}"
    return text + _UNITS.get(unit, "")


def _blocks(rows: list[TargetRow], count: int) -> list[list[TargetRow]]:
    lines = -(-len(rows) // count)
    return [rows[first : first + lines] for first in range(0, len(rows), lines)]


def _width(block: list[TargetRow]) -> int:
    return sum(max(cell_len(each.plain) for each in column) + 1 for column in _columns(block)) - 1


def _columns(block: list[TargetRow]) -> list[list[Text]]:
    return [[Text(head, "bold"), *column] for head, column in zip(_HEADS, zip(*block, strict=True), strict=True)]


def _table(blocks: list[list[TargetRow]]) -> Table:
    table = Table.grid(padding=0)
    for head in _HEADS * len(blocks):
        table.add_column(no_wrap=True, justify="right" if head in ("goal", "measured") else "left")
        table.add_column(width=_GAP if head == _HEADS[-1] else 1)
    columns = [column for block in blocks for column in _columns(block)]
    for line in range(len(columns[0])):
        found = [column[line] if line < len(column) else Text() for column in columns]
        table.add_row(*[cell for each in found for cell in (each, "")][:-1])
    return table


def _counted(targets: Sequence[Target]) -> Text:
    """Says which are not met: that is what must not be missed."""
    names = {met: [_name(target) for target in targets if target.met is met] for met in _WORDS}
    parts = ", ".join(f"{len(names[met])} {word}" for met, word in _WORDS.items() if names[met])
    missed = f": {', '.join(names[False])}" if names[False] else ""
    return Text(f"targets: {parts}{missed}", no_wrap=True, overflow="ellipsis")
