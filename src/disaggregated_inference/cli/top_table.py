"""Tables of `disagg top` that fit the screen's width, and the figures in them."""

import math
from collections.abc import Sequence
from typing import Literal

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

Cells = dict[str, str | Text]

NONE = "-"  # not known is not zero
SPEEDS = "prefill -> decode t/s"
_SIZES = ("B", "kB", "MB", "GB", "TB")
_LEAST = 16  # of a column with names
_LEAST_OF_TWO = 2 * _LEAST + len(" -> ")
# Where each column stands on the screen.
_PLACES = (
    *("#", "time", "node", "model", "link", "role", "state", "queue", "seconds", "ok", SPEEDS),
    *("address", "cpu", "mem", "gpu", "power", "temp", "way", "energy"),
    *("now", "measured", "line rate", "reached", "moved"),
)
_NUMBERS = (
    *("#", "queue", "cpu", "mem", "gpu", "power", "temp", "seconds", "energy"),
    *("now", "measured", "line rate", "reached", "moved"),
)


def fitted(rows: list[Cells], columns: Sequence[str], flexible: Sequence[str], width: int) -> Table:
    """Numbers stay whole. Where the screen is narrow, the last columns go, then the flexible ones are cut."""
    widths = {name: max([len(name), *(cell_len(str(row[name])) for row in rows)]) for name in columns}
    order = sorted(columns, key=_PLACES.index)
    while sum(_least(name, widths, flexible) + 1 for name in order) > width + 1 and len(order) > 2:
        order.remove(next(name for name in reversed(columns) if name in order))
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    spare = width + 1 - sum(_least(name, widths, flexible) + 1 for name in order)
    for name in order:
        least = _least(name, widths, flexible)
        more = min(widths[name] - least, max(0, spare))
        spare -= more
        justify: Literal["left", "right"] = "right" if name in _NUMBERS else "left"
        table.add_column(name, width=least + more, no_wrap=True, overflow="ellipsis", justify=justify)
    for row in rows:
        table.add_row(*(row[name] for name in order))
    return table


def _least(name: str, widths: dict[str, int], flexible: Sequence[str]) -> int:
    least = _LEAST_OF_TWO if name == "link" else _LEAST
    return min(widths[name], least) if name in flexible else widths[name]


def size(value: float) -> str:
    """Rounded as the dashboard does it: 1.25 is 1.3."""
    power = 0
    while value >= 999.5 and power < len(_SIZES) - 1:
        value, power = value / 1000, power + 1
    digits = 1 if power and value < 9.95 else 0
    return f"{math.floor(value * 10**digits + 0.5) / 10**digits:.{digits}f} {_SIZES[power]}"


def share(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.0f}%"
