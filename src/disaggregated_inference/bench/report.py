"""How a benchmark tells its results: one table for people, one JSON for programs."""

import json
import math
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from disaggregated_inference import __version__


class Row(msgspec.Struct, frozen=True):
    """A measured value, and the baseline it is compared with where there is one."""

    what: str
    value: float
    unit: str
    baseline: float | None = None
    against: str = ""
    goal: float | None = None
    at_most: bool = False

    @property
    def ratio(self) -> float | None:
        return self.value / self.baseline if self.baseline else None


class Report(msgspec.Struct):
    title: str
    rows: list[Row] = []

    def add(self, row: Row) -> None:
        self.rows.append(row)

    def show(self, console: Console) -> None:
        table = Table(title=self.title, title_justify="left")
        for name in ("measured", "value", "baseline", "ratio", "goal"):
            table.add_column(name, justify="left" if name == "measured" else "right")
        for row in self.rows:
            baseline = f"{_number(row.baseline)} {row.against}" if row.baseline is not None else ""
            ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
            goal = "" if row.goal is None else f"{'≤' if row.at_most else '≥'} {row.goal:g}"
            table.add_row(row.what, f"{_number(row.value)} {row.unit}", baseline, ratio, goal)
        console.print(table)

    def save(self, path: Path) -> None:
        save_rows(path, self.title, [msgspec.to_builtins(row) | {"ratio": row.ratio} for row in self.rows])


def save_rows(path: Path, title: str, rows: list[dict[str, Any]]) -> None:
    machine = {"python": platform.python_version(), "machine": platform.machine(), "system": platform.system()}
    content = {"title": title, "version": __version__, "machine": machine, "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.1f}" if abs(value) >= 10 else f"{value:.2f}"


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` per cent of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(len(ordered) * share / 100) - 1)]


def best_seconds(repeats: int, *contenders: Callable[[], float]) -> list[float]:
    """The least seconds of each contender, after one warm-up. Run in turn, so that a noisy machine is noisy to all;
    and the least, because noise only ever adds."""
    for contender in contenders:
        contender()
    runs = [[contender() for contender in contenders] for _ in range(repeats)]
    return [min(column) for column in zip(*runs, strict=True)]
