"""`autograder_checks`: sections with variables, functions, columns and reflections become items with checks."""

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import msgspec

from grader.errors import ImportRefused
from grader.points import apportioned
from grader.rubric.checks import Check, Columns, Functions, Manual, Ran, Sections, Variables, Where, Words
from grader.rubric.imported import item_id, number_of, points_of, text_of
from grader.rubric.schema import CreditRule, Item

_MOST_QUESTIONS = 100
_RULES = ("regex", "not_regex", "all_of", "any_of")


def check_items_of(checks: dict[str, Any], data: dict[str, Any], elements: list[Item], notes: list[str]) -> list[Item]:
    """Sections with points become items; elements whose points they cover are left out."""
    items, rules = list[Item](), _credit_rules(data.get("partial_credit_rules"), notes)
    sections = checks.get("sections")
    for key, section in (sections if isinstance(sections, dict) else {}).items():
        if not isinstance(section, dict):
            raise ImportRefused(f"autograder_checks.sections.{key} is no mapping.")
        items += _section_items(str(key), section, rules, items)
    if not items:
        return _with_variables(checks, elements, notes)
    covered = sum((item.points for item in items), Decimal(0))
    whole = sum((item.points for item in elements), Decimal(0))
    if covered < whole:
        items += _rest(elements, whole - covered, items, notes)
    if data.get("strict_scoring_rules"):
        notes.append("strict_scoring_rules are guidelines now: read them in the first item.")
        told = [part for part in (items[0].guideline, text_of(data["strict_scoring_rules"])) if part]
        items[0] = msgspec.structs.replace(items[0], guideline="\n".join(told))
    return items


def _section_items(
    key: str, section: dict[str, Any], rules: tuple[CreditRule, ...], before: list[Item]
) -> Iterator[Item]:
    """One item per kind of check, with equal parts of the section's points."""
    title = str(section.get("name") or key)
    checks = list(_checks(section, title))
    parts = apportioned([Decimal(1)] * len(checks), points_of(section.get("points"), title))
    taken = [item.id for item in before]
    for (what, check), points in zip(checks, parts, strict=True):
        chosen = item_id(f"{key} {what}" if len(checks) > 1 else key, taken)
        taken.append(chosen)
        guideline = text_of(section.get("description", ""))
        yield Item(
            id=chosen,
            title=f"{title}: {what}" if len(checks) > 1 else title,
            points=points,
            check=check,
            group=title,
            guideline=guideline,
            credit_rules=() if isinstance(check, Manual | Words) else rules,
        )


def _checks(section: dict[str, Any], title: str) -> Iterator[tuple[str, Check]]:
    found = False
    if section.get("variables"):
        yield "variables", Variables(names=_names(section["variables"]))
        found = True
    if section.get("functions"):
        same = section.get("function_equivalents") or {}
        equivalents = {name: _names(others) for name, others in same.items()} if isinstance(same, dict) else {}
        yield "functions", Functions(names=_names(section["functions"]), equivalents=equivalents)
        found = True
    if section.get("required_columns"):
        yield "columns", Columns(names=_names(section["required_columns"]))
        found = True
    questions = section.get("reflection_questions")
    if questions:
        least = int(number_of(section.get("min_words_per_question") or 20, f"{title}: min_words_per_question"))
        yield "reflection", Words(min_words=least, questions=_questions(questions), where=_section_of(questions, title))
        found = True
    if not found:
        kind = str(section.get("check_type") or "")
        yield (
            "check",
            Ran() if kind in ("execution", "runs") else Sections(names=(title,)) if kind == "section" else Manual(),
        )


def _names(value: Any) -> tuple[str, ...]:
    listed = list(value) if isinstance(value, list | dict) else [value]
    return tuple(str(each.get("name") if isinstance(each, dict) else each) for each in listed)


def _questions(value: Any) -> tuple[str, ...]:
    """Texts of the questions; a number N stands for `Question 1` to `Question N`."""
    if isinstance(value, int):
        return tuple(f"Question {number}" for number in range(1, min(value, _MOST_QUESTIONS) + 1))
    listed = value if isinstance(value, list) else [value]
    return tuple(f"Question {each}" if isinstance(each, int) else str(each) for each in listed)


def _section_of(questions: Any, title: str) -> Where:
    """Numbered questions are looked for under the section's own heading."""
    return Where(section=title) if isinstance(questions, int) else Where()


def _credit_rules(value: Any, notes: list[str]) -> tuple[CreditRule, ...]:
    entries = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    rules = []
    for entry in entries:
        kind = entry.get("condition_type") if isinstance(entry, dict) else None
        if kind not in _RULES:
            notes.append(f"A partial credit rule of type `{kind}` was left out; types: {', '.join(_RULES)}.")
            continue
        patterns = entry.get("patterns") or entry.get("pattern") or entry.get("condition") or entry.get("conditions")
        rules.append(
            CreditRule(
                when=kind,
                patterns=_names(patterns),
                multiplier=number_of(entry.get("multiplier", 0), "partial_credit_rules: multiplier"),
                priority=int(number_of(entry.get("priority", 0), "partial_credit_rules: priority")),
                explanation=text_of(entry.get("explanation", "")),
            )
        )
    return tuple(rules)


def _with_variables(checks: dict[str, Any], elements: list[Item], notes: list[str]) -> list[Item]:
    """Only `required_variables`: they become a cap-free check of the first element's points."""
    names = checks.get("required_variables")
    if not names or not elements:
        return elements
    notes.append("required_variables have no points of their own: the first element checks them.")
    first = msgspec.structs.replace(elements[0], check=Variables(names=_names(names)))
    return [first, *elements[1:]]


def _rest(elements: list[Item], points: Decimal, items: list[Item], notes: list[str]) -> list[Item]:
    """Points of the elements that no section covers stay with a human."""
    notes.append(f"The sections cover fewer points than the elements: {points} points are graded by a human.")
    titles = ", ".join(item.title for item in elements)
    rest = Item(
        id=item_id("other", [item.id for item in items]),
        title="Other criteria",
        points=points,
        check=Manual(instructions=titles),
        guideline="\n".join(f"{item.title}: {item.guideline}" for item in elements),
    )
    return [rest]
