"""Rubrics in other shapes become ours: flat, components with levels, elements, and elements with automatic checks."""

from decimal import Decimal
from typing import Any

from grader.errors import ImportRefused
from grader.points import apportioned, plain
from grader.rubric.autograder import check_items_of
from grader.rubric.checks import Manual
from grader.rubric.imported import Imported, item_id, number_of, points_of, step_for, text_of
from grader.rubric.schema import Item, Level, Rubric

# What a level earns when the file does not say.
LEVEL_SHARES = {
    "excellent": "1",
    "outstanding": "1",
    "very good": "0.9",
    "good": "0.85",
    "proficient": "0.85",
    "satisfactory": "0.75",
    "adequate": "0.75",
    "fair": "0.65",
    "needs improvement": "0.5",
    "needs_improvement": "0.5",
    "developing": "0.5",
    "poor": "0.25",
    "unsatisfactory": "0.25",
    "missing": "0",
}


def import_rubric(data: Any, name: str) -> Imported:
    """Raises ImportRefused when the data has none of the known shapes."""
    if not isinstance(data, dict):
        raise ImportRefused(f"{name}: a rubric is a mapping; this is a {type(data).__name__}.")
    if "rubric_elements" in data:
        return _elements(data, name)
    parts = data.get("components") or data.get("rubric_categories") or data.get("categories")
    if isinstance(parts, list | dict):
        return _components(data, parts, name)
    flat = data.get("criteria") if isinstance(data.get("criteria"), dict) else data.get("rubric", data)
    if isinstance(flat, dict) and any(isinstance(each, dict) and "points" in each for each in flat.values()):
        return _flat(flat, data, name)
    raise ImportRefused(
        f"{name}: none of the known shapes. The importer takes criteria with `points`, `components` with levels, and"
        " `rubric_elements`, with or without `autograder_checks`; notebooks of nbgrader or otter are files."
    )


def _info(data: dict[str, Any]) -> dict[str, Any]:
    found = data.get("assignment_info")
    return found if isinstance(found, dict) else {}


def _made(name: str, items: list[Item], shape: str, notes: list[str], data: dict[str, Any]) -> Imported:
    if not items:
        raise ImportRefused(f"{name}: the rubric has no items.")
    info = _info(data)
    title = str(info.get("title") or info.get("name") or data.get("title") or data.get("assignment") or name)
    rubric = Rubric(assignment=name, title=title, items=tuple(items), point_step=step_for(items))
    told = info.get("total_points", data.get("total_points", data.get("total")))
    if told is not None and points_of(told, "total_points") != rubric.maximum:
        notes.append(f"total_points is {told}, but the items have {plain(rubric.maximum)} points.")
    return Imported(rubric=rubric, shape=shape, notes=tuple(notes))


def _flat(flat: dict[str, Any], data: dict[str, Any], name: str) -> Imported:
    items = list[Item]()
    for title, entry in flat.items():
        if isinstance(entry, dict) and "points" in entry:
            points = points_of(entry["points"], title)
            guideline = text_of(entry.get("description", ""))
            items.append(_manual(title, points, guideline, items))
    return _made(name, items, "flat", [_MANUAL_NOTE.format(count=len(items))], data)


_MANUAL_NOTE = "{count} items are graded by a human: give them a check or a question for the model."


def _manual(title: str, points: Decimal, guideline: str, before: list[Item], levels: tuple[Level, ...] = ()) -> Item:
    taken = [item.id for item in before]
    return Item(
        id=item_id(title, taken), title=title, points=points, check=Manual(), guideline=guideline, levels=levels
    )


def _components(data: dict[str, Any], parts: list[Any] | dict[str, Any], name: str) -> Imported:
    named = parts.items() if isinstance(parts, dict) else ()
    entries = parts if isinstance(parts, list) else [_with_name(key, each) for key, each in named]
    items, notes = list[Item](), list[str]()
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise ImportRefused(f"{name}: components[{number}] is no mapping.")
        title = str(entry.get("name") or entry.get("title") or f"Component {number + 1}")
        points = points_of(entry.get("points", entry.get("max_points")), title)
        levels = _levels(entry.get("criteria") or entry.get("levels"), points, title, notes)
        items.append(_manual(title, points, text_of(entry.get("description", "")), items, levels))
    return _made(name, items, "components", [*notes, _MANUAL_NOTE.format(count=len(items))], data)


def _with_name(name: str, entry: Any) -> Any:
    return {"name": name, **entry} if isinstance(entry, dict) else entry


def _levels(criteria: Any, points: Decimal, title: str, notes: list[str]) -> tuple[Level, ...]:
    """Levels by name, with their points where the file has them."""
    if not isinstance(criteria, dict):
        return ()
    levels = []
    for level, entry in criteria.items():
        share = _level_share(level, entry, points)
        if share is None:
            notes.append(f"{title}: level `{level}` has no known share of the points: it got 0.")
        description = text_of(entry.get("description", entry) if isinstance(entry, dict) else entry)
        levels.append(Level(name=level, share=share or Decimal(0), description=description))
    return tuple(sorted(levels, key=lambda level: -level.share))


def _level_share(level: str, entry: Any, points: Decimal) -> Decimal | None:
    if isinstance(entry, dict) and "points" in entry and entry["points"] is not None:
        told = number_of(entry["points"], f"level {level}")
        return max(Decimal(0), min(Decimal(1), (told / points).quantize(Decimal("0.0001"))))
    known = LEVEL_SHARES.get(level.casefold().strip())
    return Decimal(known) if known is not None else None


def _elements(data: dict[str, Any], name: str) -> Imported:
    """Elements by `max_points`, or by `weight` of the total. Automatic checks of a section replace its element."""
    elements = data["rubric_elements"]
    if not isinstance(elements, dict):
        raise ImportRefused(f"{name}: rubric_elements is no mapping.")
    points = _element_points(elements, data, name)
    items, notes = list[Item](), list[str]()
    for title, entry in elements.items():
        guideline = "\n".join(part for part in (text_of(entry.get("criteria")), _deductions(entry)) if part)
        items.append(_manual(title.replace("_", " "), points[title], guideline, items))
    checks = data.get("autograder_checks")
    shape = "elements"
    if isinstance(checks, dict):
        shape = "autograder_checks"
        items = check_items_of(checks, data, items, notes)
    manual = sum(isinstance(item.check, Manual) for item in items)
    return _made(name, items, shape, [*notes, *([_MANUAL_NOTE.format(count=manual)] if manual else [])], data)


def _deductions(entry: dict[str, Any]) -> str:
    found = text_of(entry.get("deductions"))
    return f"Deductions:\n{found}" if found else ""


def _element_points(elements: dict[str, Any], data: dict[str, Any], name: str) -> dict[str, Decimal]:
    for title, entry in elements.items():
        if not isinstance(entry, dict):
            raise ImportRefused(f"{name}: rubric_elements.{title} is no mapping.")
    if all("max_points" in entry or "points" in entry for entry in elements.values()):
        return {
            title: points_of(entry.get("max_points", entry.get("points")), title) for title, entry in elements.items()
        }
    if not all("weight" in entry for entry in elements.values()):
        raise ImportRefused(f"{name}: every rubric element needs `max_points`, or every one a `weight`.")
    total = points_of(_info(data).get("total_points", 100), "total_points")
    weights = [points_of(entry["weight"], title) for title, entry in elements.items()]
    return dict(zip(elements, apportioned(weights, total), strict=True))
