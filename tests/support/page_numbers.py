"""Numbers as the dashboard writes them (static/format.js), for tests of what is on the screen."""

import re

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


def same(shown: str, expected: str) -> bool:
    """Equal, but for how the two languages round the last digit."""
    numbers = [[float(each.replace(",", "")) for each in re.findall(r"[\d,.]*\d", text)] for text in (shown, expected)]
    words = [re.sub(r"[\d,.]*\d", "#", text) for text in (shown, expected)]
    return words[0] == words[1] and numbers[0] == pytest.approx(numbers[1], rel=0.006)
