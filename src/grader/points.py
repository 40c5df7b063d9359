"""Points are exact decimals: 0.1 + 0.2 is 0.3, and the parts of a score always sum to its total."""

import math
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction

STEP = Decimal("0.01")


def rounded(value: Decimal | Fraction | int, step: Decimal = STEP) -> Decimal:
    """The nearest multiple of the step; halves go away from zero."""
    count = math.floor(abs(Fraction(value)) / Fraction(step) + Fraction(1, 2))
    return count * step if value >= 0 else -count * step


def share_of(points: Decimal, part: Fraction, step: Decimal = STEP) -> Decimal:
    """A part of the points, for example 2 of 3 variables. All and nothing are exact."""
    return points if part >= 1 else rounded(Fraction(points) * part, step)


def apportioned(parts: Sequence[Decimal], total: Decimal, step: Decimal = STEP) -> tuple[Decimal, ...]:
    """The parts scaled to another total, in whole steps that sum to exactly that total (largest remainders)."""
    whole = sum(parts, Decimal(0))
    if not whole:
        return tuple(Decimal(0) for _ in parts)
    exact = [Fraction(part) * Fraction(total) / Fraction(whole) for part in parts]
    floors = [_floored(value, step) for value in exact]
    order = sorted(range(len(parts)), key=lambda i: (Fraction(floors[i]) - exact[i], i))
    missing = total - sum(floors, Decimal(0))
    for i in order:
        add = min(step, missing)
        floors[i] += add
        missing -= add
    return tuple(floors)


def _floored(value: Fraction, step: Decimal) -> Decimal:
    return math.floor(value / Fraction(step)) * step


def plain(points: Decimal) -> str:
    """For people: 10, 7.5, 0.25; never 1E+1 or 7.50."""
    text = f"{points:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text
