"""Numbers as the dashboard writes them (static/format.js), for tests of what is on the screen."""

import re
from collections.abc import Sequence

import pytest

from disaggregated_inference.cli.top_table import size

NONE = "\u2013"  # not known
_JOULES = ("J", "kJ", "MJ", "GJ")


def seconds(value: float) -> str:
    if value == 0:
        return "0 s"
    if value < 0.0995:
        return f"{value * 1000:.{1 if value < 0.00995 else 0}f} ms"
    return f"{value:.2f} s" if value < 9.995 else f"{value:.1f} s" if value < 99.95 else f"{value:,.0f} s"


def rate(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def size_per_second(value: float) -> str:
    return f"{size(value)}/s"


def figure(value: float) -> str:
    """Three digits that count."""
    return f"{float(f'{value:.3g}'):,.6f}".rstrip("0").rstrip(".")


def share(value: float) -> str:
    return f"{figure(round(value * 1000) / 10)} %"


def joules(value: float) -> str:
    power = 0
    while value >= 999.5 and power < len(_JOULES) - 1:
        value, power = value / 1000, power + 1
    return f"{figure(value)} {_JOULES[power]}"


def with_unit(value: float, unit: str, goal: float | None = None) -> str:
    """Of a target or an alarm. One that is not the goal, or not 100 %, is not rounded to it."""
    limits = [limit for limit in (goal, 100 if unit == "%" else None) if limit is not None and limit != value]
    digits = next(each for each in range(3, 9) if each == 8 or float(f"{value:.{each}g}") not in limits)
    text = f"{float(f'{value:.{digits}g}'):,.6f}".rstrip("0").rstrip(".")
    if unit == "$":
        return "< $0.000001" if 0 < value < 1e-6 else f"${text}"
    return {"x": f"{text}x", "1/s": f"{text} per s", "1/kWh": f"{text} per kWh"}.get(unit, f"{text} {unit}")


def same(shown: str, expected: str) -> bool:
    """Equal, but for how the two languages round the last digit."""
    numbers = [[float(each.replace(",", "")) for each in re.findall(r"[\d,.]*\d", text)] for text in (shown, expected)]
    words = [re.sub(r"[\d,.]*\d", "#", text) for text in (shown, expected)]
    return words[0] == words[1] and numbers[0] == pytest.approx(numbers[1], rel=0.006)


def all_same(shown: Sequence[str], expected: Sequence[str]) -> bool:
    return len(shown) == len(expected) and all(map(same, shown, expected))
