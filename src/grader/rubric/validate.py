"""Rules that the schema's types cannot say. Each broken rule gives a path and a message."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal

import msgspec

from grader.points import plain
from grader.rubric.checks import CodeTests, Columns, Functions, ModelJudged, OutputMatch, Sections, Variables, Words
from grader.rubric.located import Path
from grader.rubric.schema import CreditRule, Item, Rubric

Broken = tuple[Path, str]
_ID = re.compile(r"[A-Za-z0-9][\w.-]*")
_LARGEST, _DIGITS = 10**9, 12
_ODD = f"This must be a plain number: finite, at most {_LARGEST:,}, at most {_DIGITS} digits after the point."


def odd_numbers(value: object) -> Iterator[Broken]:
    """Of a rubric or of a part of it. The rules below compute with plain numbers."""
    yield from ((path, _ODD) for path, number in _numbers(value, ()) if not _is_plain(number))


def rubric_problems(rubric: Rubric) -> Iterator[Broken]:
    if not rubric.assignment.strip():
        yield ("assignment",), "The assignment needs a name."
    if not rubric.items:
        yield ("items",), "A rubric needs at least one item."
    if rubric.point_step <= 0:
        yield ("point_step",), "point_step must be more than 0."
    yield from _ids(rubric)
    for i, item in enumerate(rubric.items):
        yield from (((("items", i, *path)), message) for path, message in _item(item, rubric))
    yield from _total(rubric)
    yield from _ai_share(rubric)
    yield from _caps(rubric)
    yield from _letters(rubric)
    yield from _late(rubric)
    yield from _limits(rubric)


def _numbers(value: object, path: Path) -> Iterator[tuple[Path, Decimal | float]]:
    if isinstance(value, Decimal | float):
        yield path, value
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _numbers(getattr(value, name), (*path, name))
    elif isinstance(value, tuple):
        for i, each in enumerate(value):
            yield from _numbers(each, (*path, i))


def _is_plain(value: Decimal | float) -> bool:
    """Sums and products of such numbers are exact."""
    if isinstance(value, float):
        return math.isfinite(value) and abs(value) <= _LARGEST
    return value.is_finite() and value.copy_abs() <= _LARGEST and -int(value.as_tuple().exponent) <= _DIGITS


def _ids(rubric: Rubric) -> Iterator[Broken]:
    counts = Counter(item.id for item in rubric.items)
    for i, item in enumerate(rubric.items):
        if counts[item.id] > 1:
            yield ("items", i, "id"), f"The id `{item.id}` is there {counts[item.id]} times."
        if not _ID.fullmatch(item.id):
            yield ("items", i, "id"), f"`{item.id}` is no id: use letters, digits, `.`, `-` and `_`."


def _item(item: Item, rubric: Rubric) -> Iterator[Broken]:
    if item.points <= 0:
        yield ("points",), "points must be more than 0; write `deduction: true` for points that are taken away."
    elif rubric.point_step > 0 and item.points % rubric.point_step:
        yield ("points",), f"{plain(item.points)} is no multiple of point_step {plain(rubric.point_step)}."
    if not 0 <= item.ai_share <= 1:
        yield ("ai_share",), "ai_share is a part of the points: 0 to 1."
    for i, level in enumerate(item.levels):
        if not 0 <= level.share <= 1:
            yield ("levels", i, "share"), "share is a part of the points: 0 to 1."
    for i, rule in enumerate(item.credit_rules):
        yield from ((("credit_rules", i, *path), message) for path, message in _rule(rule))
    yield from ((("check", *path), message) for path, message in _check(item))


def _rule(rule: CreditRule) -> Iterator[Broken]:
    if not 0 <= rule.multiplier <= 1:
        yield ("multiplier",), "multiplier is a part of the points: 0 to 1."
    if not rule.patterns:
        yield ("patterns",), "A rule needs at least one pattern."
    for i, pattern in enumerate(rule.patterns):
        try:
            re.compile(pattern)
        except re.error as error:
            yield ("patterns", i), f"Not a regular expression: {error}."


def _check(item: Item) -> Iterator[Broken]:
    check = item.check
    if isinstance(check, Variables | Functions | Sections | Columns):
        if not check.names:
            yield ("names",), "The check needs at least one name."
    elif isinstance(check, Words):
        if check.min_words < 1:
            yield ("min_words",), "min_words must be at least 1."
    elif isinstance(check, OutputMatch):
        if check.where.anywhere:
            yield ("where",), "An output check needs a tag, a section, a variable or a grade_id."
        if check.rel_tol < 0 or check.abs_tol < 0:
            yield ("rel_tol" if check.rel_tol < 0 else "abs_tol",), "A tolerance cannot be negative."
    elif isinstance(check, CodeTests):
        if not check.code.strip():
            yield ("code",), "The tests have no code."
    elif isinstance(check, ModelJudged) and not check.question.strip():
        yield ("question",), "The model needs a question."


def _total(rubric: Rubric) -> Iterator[Broken]:
    if rubric.total is not None and rubric.total != rubric.maximum:
        yield ("total",), f"total is {plain(rubric.total)}, but the items have {plain(rubric.maximum)} points."


def _ai_share(rubric: Rubric) -> Iterator[Broken]:
    if not 0 <= rubric.ai_share_max <= 1:
        yield ("ai_share_max",), "ai_share_max is a part of the points: 0 to 1."
    share = sum((item.points * item.ai_share for item in rubric.items), Decimal(0))
    if share > rubric.maximum * rubric.ai_share_max:
        yield (
            ("ai_share_max",),
            f"The items give models {plain(share)} points; ai_share_max allows"
            f" {plain(rubric.maximum * rubric.ai_share_max)}.",
        )


def _caps(rubric: Rubric) -> Iterator[Broken]:
    known = {item.id for item in rubric.items}
    for i, cap in enumerate(rubric.caps):
        if cap.at_most < 0:
            yield ("caps", i, "at_most"), "at_most cannot be negative."
        if not cap.reason.strip():
            yield ("caps", i, "reason"), "A cap needs a reason: students see it."
        for j, name in enumerate(cap.items):
            if name not in known:
                yield ("caps", i, "items", j), f"There is no item `{name}`."
        if cap.unless and cap.unless not in known:
            yield ("caps", i, "unless"), f"There is no item `{cap.unless}`."


def _letters(rubric: Rubric) -> Iterator[Broken]:
    if not rubric.letters:
        yield ("letters",), "The letter scale is empty."
        return
    bounds = [letter.from_percent for letter in rubric.letters]
    for i in range(1, len(bounds)):
        if bounds[i] >= bounds[i - 1]:
            yield ("letters", i, "from_percent"), "Letters go from the highest percentage to the lowest."
    if bounds[-1] != 0:
        yield ("letters", len(bounds) - 1, "from_percent"), "The last letter starts at 0: every score needs a letter."


def _late(rubric: Rubric) -> Iterator[Broken]:
    late = rubric.late
    if late is None:
        return
    for name in ("per_day_percent", "max_percent"):
        if not 0 <= getattr(late, name) <= 100:
            yield ("late", name), f"{name} is 0 to 100."
    if late.grace_minutes < 0:
        yield ("late", "grace_minutes"), "grace_minutes cannot be negative."


def _limits(rubric: Rubric) -> Iterator[Broken]:
    for name in rubric.limits.__struct_fields__:
        if getattr(rubric.limits, name) <= 0:
            yield ("limits", name), f"{name} must be more than 0."
