"""What an importer gives: a rubric, and notes about what a human should look at."""

import re
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec

from grader.errors import ImportRefused
from grader.points import STEP
from grader.rubric.schema import Item, Rubric

_LARGEST = 10**9


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    rubric: Rubric
    shape: str
    notes: tuple[str, ...] = ()


def item_id(name: str, taken: Iterable[str]) -> str:
    """An id from a name: `Load the Data!` is `load-the-data`; a second one gets a number."""
    base = re.sub(r"[^a-z0-9]+", "-", name.casefold()).strip("-") or "item"
    used, number, chosen = set(taken), 2, base
    while chosen in used:
        chosen, number = f"{base}-{number}", number + 1
    return chosen


def points_of(value: Any, where: str) -> Decimal:
    """Numbers and texts as `10`, `10 pts`, `12.5 points`."""
    found = re.search(r"-?\d+(?:\.\d+)?", str(value)) if not isinstance(value, bool) else None
    try:
        points = Decimal(found.group()) if found else Decimal("NaN")
    except InvalidOperation:
        points = Decimal("NaN")
    if not points.is_finite() or points <= 0:
        raise ImportRefused(f"{where}: `{value}` is no number of points.")
    return points


def number_of(value: Any, where: str) -> Decimal:
    """Any plain number, as a number or as a text."""
    try:
        number = Decimal(str(value)) if not isinstance(value, bool) else Decimal("NaN")
    except InvalidOperation:
        number = Decimal("NaN")
    if not number.is_finite() or abs(number) > _LARGEST:
        raise ImportRefused(f"{where}: `{str(value)[:40]}` is no number.")
    return number


def step_for(items: Iterable[Item]) -> Decimal:
    """The step of points: finer than 0.01 only where the items need it."""
    finest = min((item.points.as_tuple().exponent for item in items), default=0)
    return min(STEP, Decimal(1).scaleb(int(finest)))


def text_of(value: Any) -> str:
    """Descriptions of any shape as lines of text."""
    if isinstance(value, dict):
        return "\n".join(f"{key}: {text_of(each)}" for key, each in value.items())
    if isinstance(value, list):
        return "\n".join(text_of(each) for each in value)
    return "" if value is None else str(value)
