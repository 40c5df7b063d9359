"""The time of a prefill of any length, from the lengths that a node has measured.

Prefill time is a power of the length over a short stretch: near 0 where reading the weights is all the work, 1 where
multiplying is, 2 where attention is. So the curve is straight between two measured lengths, both on logarithmic scales.
"""

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from disaggregated_inference.api import Rate

_FEW_SAMPLES = 3  # with fewer, one bad reading can be the estimate, and a slope must not rest on it


class _Point(NamedTuple):
    tokens: int
    seconds: float
    samples: int


def prefill_seconds(rates: Iterable[Rate], tokens: int) -> float | None:
    """Of a prompt of this length; None: nothing is measured."""
    points = _points(rates)
    if not points:
        return None
    tokens = max(tokens, 1)
    for left, right in pairwise(points):
        if left.tokens <= tokens <= right.tokens:
            return _on_line(left, tokens, _slope(left, right))
    if tokens < points[0].tokens:
        return _on_line(points[0], tokens, _clamped(_slope(*points[:2]), 0.0, 1.0) if len(points) > 1 else 1.0)
    return _on_line(points[-1], tokens, _last_slope(points))


def _points(rates: Iterable[Rate]) -> list[_Point]:
    """Shortest first. A shorter prefill never takes longer than a longer one: where it seems so, it was disturbed."""
    known = sorted((rate for rate in rates if rate.tokens_per_s > 0), key=_length, reverse=True)
    longest_s, points = math.inf, []
    for rate in known:
        longest_s = min(longest_s, _length(rate) / rate.tokens_per_s)
        points.append(_Point(_length(rate), longest_s, rate.samples))
    return points[::-1]


def _length(rate: Rate) -> int:
    return rate.measured_size or max(rate.size, 1)


def _last_slope(points: list[_Point]) -> float:
    """Beyond the longest: as steep as before it."""
    if len(points) < 2 or min(point.samples for point in points[-2:]) < _FEW_SAMPLES:
        return 1.0
    return _clamped(_slope(*points[-2:]), 1.0, 2.0)


def _slope(left: _Point, right: _Point) -> float:
    if left.tokens >= right.tokens:
        return 1.0
    return math.log(right.seconds / left.seconds) / math.log(right.tokens / left.tokens)


def _on_line(point: _Point, tokens: int, slope: float) -> float:
    return point.seconds * math.pow(tokens / point.tokens, slope)


def _clamped(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)
