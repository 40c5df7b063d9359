"""Results of a benchmark: a table for people, a JSON file for programs."""

import json
import math
import platform
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from disaggregated_inference import __version__


class Row(msgspec.Struct, frozen=True):
    """A measured value and its baseline, if any. If both were measured in rounds, the ratio is the median of the
    rounds' ratios."""

    what: str
    value: float
    unit: str
    baseline: float | None = None
    against: str = ""
    goal: float | None = None
    at_most: bool = False
    ratios: tuple[float, ...] = ()

    @property
    def ratio(self) -> float | None:
        if self.ratios:
            return statistics.median(self.ratios)
        return self.value / self.baseline if self.baseline else None

    def ratio_text(self) -> str:
        """With the middle half of the rounds, if there are enough of them."""
        if self.ratio is None:
            return ""
        middle = [percentile(self.ratios, share) for share in (25, 75)] if len(self.ratios) > 3 else []
        return f"{self.ratio:.2f}" + (f" ({middle[0]:.2f} to {middle[1]:.2f})" if middle else "")


class Report(msgspec.Struct):
    title: str
    rows: list[Row] = []

    def add(self, row: Row) -> None:
        self.rows.append(row)

    def publish(self, path: Path, notes: Sequence[str] = ()) -> "Report":
        """Print the table and the notes, and save the JSON file."""
        console = Console()
        self.show(console)
        for note in notes:
            console.print(note, highlight=False)
        rows = [msgspec.to_builtins(row) | {"ratio": row.ratio} for row in self.rows]
        save_rows(path, self.title, rows)
        return self

    def show(self, console: Console) -> None:
        table = Table(title=self.title, title_justify="left")
        for name in ("measured", "value", "baseline", "ratio", "goal"):
            table.add_column(name, justify="left" if name == "measured" else "right")
        for row in self.rows:
            baseline = f"{_number(row.baseline)} {row.against}" if row.baseline is not None else ""
            goal = "" if row.goal is None else f"{'≤' if row.at_most else '≥'} {row.goal:g}"
            table.add_row(row.what, f"{_number(row.value)} {row.unit}", baseline, row.ratio_text(), goal)
        console.print(table)


def progress(text: str) -> None:
    Console().print(text, style="dim", highlight=False)


def save_rows(path: Path, title: str, rows: list[dict[str, Any]]) -> None:
    machine = {"python": platform.python_version(), "machine": platform.machine(), "system": platform.system()}
    content = {"title": title, "version": __version__, "machine": machine, "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")
    progress(f"saved {path}")


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.1f}" if abs(value) >= 10 else f"{value:.2f}"


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` per cent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(len(ordered) * share / 100) - 1)]


def in_turn(rounds: int, *contenders: Callable[[], float]) -> list[list[float]]:
    """Seconds of each contender in every round, after a warm-up. Contenders alternate, so that noise of the machine
    hits all of them. The order changes from round to round."""
    for contender in contenders:
        contender()
    columns: list[list[float]] = [[] for _ in contenders]
    for round in range(rounds):
        for place in range(len(contenders)):
            index = (round + place) % len(contenders)
            columns[index].append(contenders[index]())
    return columns


def compared(
    what: str,
    amount: float,
    unit: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    against: str,
    goal: float | None = None,
) -> Row:
    """`amount` per second, ours and theirs, from the seconds of each round."""
    rates = [amount / statistics.median(column) for column in (ours, theirs)]
    ratios = tuple(other / mine for mine, other in zip(ours, theirs, strict=True))
    return Row(what, rates[0], unit, rates[1], against, goal, ratios=ratios)
