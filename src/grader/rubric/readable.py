"""The broken rules of a rubric file, also where parts of it cannot be read: no mistake hides another.

A field that cannot be read is taken as one that breaks no rule."""

from collections.abc import Iterator
from decimal import Decimal
from typing import Any, get_args, get_origin

import msgspec

from grader.rubric.checks import CHECK_KINDS, Check, Manual, Where
from grader.rubric.located import Path
from grader.rubric.schema import LETTERS, Rubric
from grader.rubric.validate import Broken, odd_numbers, rubric_problems

_GOOD: dict[str, Any] = {
    "assignment": "-",
    "items": (),
    "ai_share_max": Decimal(1),
    "point_step": Decimal("1e-12"),
    "letters": LETTERS,
    "title": "-",
    "points": Decimal(1),
    "check": Manual(),
    "at_most": Decimal(0),
    "reason": "-",
    "name": "-",
    "share": Decimal(0),
    "per_day_percent": Decimal(0),
    "names": ("-",),
    "min_words": 1,
    "code": "-",
    "question": "-",
    "where": Where(tag="-"),
    "when": "regex",
    "patterns": ("-",),
    "multiplier": Decimal(0),
}


def broken_rules(data: dict[str, Any]) -> Iterator[Broken]:
    odd = list[Broken]()
    rubric, unread = _read_what_can_be(data, Rubric, (), odd)
    yield from odd
    hides_sums = any(path[0] == "items" and path[-1] in ("items", "points", "id", "ai_share") for path in unread)
    for path, message in rubric_problems(rubric):
        if not (hides_sums and _is_about_all_items(path)):
            yield path, message


def _is_about_all_items(path: Path) -> bool:
    return path in (("items",), ("total",), ("ai_share_max",)) or (path[0] == "caps" and path[2] in ("items", "unless"))


def _read_what_can_be(data: Any, kind: Any, path: Path, odd: list[Broken]) -> tuple[Any, list[Path]]:
    """And the places that cannot be read."""
    unread, values = list[Path](), dict[str, Any]()
    for field in msgspec.structs.fields(kind):
        name, here = field.encode_name, (*path, field.encode_name)
        if name not in data:
            if field.required:
                unread.append(here)
                values[name] = _good(here)
            continue
        value, inner = _read(data[name], field.type, here, odd)
        unread += inner
        if value is not None:
            values[name] = value
    return kind(**values), unread


def _read(data: Any, wanted: Any, path: Path, odd: list[Broken]) -> tuple[Any, list[Path]]:
    kind = struct_for(wanted, data)
    if kind is not None:
        return _read_what_can_be(data, kind, path, odd)
    entries = entries_for(wanted, data)
    if entries is not None and path[-1] != "letters":  # they are in order: a gap says nothing
        found = [_read(one if isinstance(one, dict) else {}, entries, (*path, i), odd) for i, one in enumerate(data)]
        return tuple(value for value, _ in found), [place for _, inner in found for place in inner]
    try:
        value = msgspec.convert(data, wanted, strict=False)
    except msgspec.ValidationError:
        return _good(path), [path]
    if broken := [((*path, *inner), message) for inner, message in odd_numbers(value)]:
        odd += broken
        return _good(path), [path]
    return value, []


def _good(path: Path) -> Any:
    """In the place of what cannot be read; None: the field's default. Each id is one of its own."""
    name = path[-1]
    if name == "id":
        return "-".join(map(str, path))
    return _GOOD.get(str(name))


def struct_for(wanted: Any, data: Any) -> type[msgspec.Struct] | None:
    """The struct that a mapping should become: of a check, by its kind."""
    if not isinstance(data, dict):
        return None
    if wanted == Check:
        return CHECK_KINDS.get(data["kind"]) if isinstance(data.get("kind"), str) else None
    kinds = [one for one in (wanted, *get_args(wanted)) if is_struct(one)]
    return kinds[0] if kinds and get_origin(wanted) is not tuple else None


def entries_for(wanted: Any, data: Any) -> type[msgspec.Struct] | None:
    """The struct that each entry of a list should become."""
    if not isinstance(data, list) or get_origin(wanted) is not tuple:
        return None
    return next((one for one in get_args(wanted) if is_struct(one)), None)


def is_struct(wanted: Any) -> bool:
    return isinstance(wanted, type) and issubclass(wanted, msgspec.Struct)
