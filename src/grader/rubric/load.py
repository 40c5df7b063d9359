"""A rubric file becomes a `Rubric`, or a list of all its mistakes with their lines."""

import difflib
import re
from typing import Any

import msgspec
import yaml

from grader.errors import RubricInvalid
from grader.problems import Problem
from grader.rubric.checks import CHECK_KINDS
from grader.rubric.located import Located, Path, read_located
from grader.rubric.readable import broken_rules, entries_for, struct_for
from grader.rubric.schema import Cap, Item, Letter, Rubric

_PATH = re.compile(r" - at `(?:key in )?\$(.*?)`$")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")
_UNKNOWN = re.compile(r"unknown field `(.+?)`")
_WORDS = {"Invalid decimal string": "Not a number", "Object missing": "Missing", "`decimal`": "a number"}
_PARTS: dict[str, type[msgspec.Struct]] = {"items": Item, "caps": Cap, "letters": Letter}


def load_rubric(text: str, source: str = "rubric") -> Rubric:
    """Raises RubricInvalid with every problem, not only the first."""
    located = read_located(text, source)
    if not isinstance(located.data, dict):
        raise RubricInvalid(source, [located.problem((), "A rubric is a mapping with `assignment` and `items`.")])
    problems = _shape_problems(located)
    problems += [located.problem(path, message) for path, message in broken_rules(located.data)]
    if problems:
        raise RubricInvalid(source, sorted(problems, key=lambda problem: (problem.line, problem.column)))
    return msgspec.convert(located.data, Rubric, strict=False)


def _shape_problems(located: Located) -> list[Problem]:
    """Each item by itself, so that one mistake does not hide the next."""
    problems, rest = list[Problem](), dict(located.data)
    for name, kind in _PARTS.items():
        if isinstance(rest.get(name), list):
            for i, entry in enumerate(rest[name]):
                problems += _problems_of(located, entry, kind, (name, i))
            rest[name] = []
    return problems + _problems_of(located, rest, Rubric, ())


def _problems_of(located: Located, data: Any, kind: type[msgspec.Struct], path: Path) -> list[Problem]:
    """Field by field: a line with three mistakes is told three times."""
    if not isinstance(data, dict):
        return _refusals(located, data, kind, kind, path)
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    problems, meant, tag = list[Problem](), set[str](), kind.__struct_config__.tag_field
    for name in (name for name in data if name != tag):
        if name not in fields:
            meant |= set(_near(name, list(fields)))
            problems.append(_problem(located, f"unknown field `{name}`", kind, path))
        else:
            problems += _refusals(located, data[name], fields[name].type, kind, (*path, name))
    missing = [name for name, field in fields.items() if field.required and name not in data and name not in meant]
    return problems + [_problem(located, f"Object missing required field `{name}`", kind, path) for name in missing]


def _refusals(located: Located, data: Any, wanted: Any, kind: type[msgspec.Struct], path: Path) -> list[Problem]:
    if (inner := struct_for(wanted, data)) is not None:
        return _problems_of(located, data, inner, path)
    if (entry := entries_for(wanted, data)) is not None:
        return [problem for i, one in enumerate(data) for problem in _problems_of(located, one, entry, (*path, i))]
    try:
        msgspec.convert(data, wanted, strict=False)
    except msgspec.ValidationError as error:
        return [_problem(located, str(error), kind, path)]
    return []


def _near(name: str, fields: list[str]) -> list[str]:
    return difflib.get_close_matches(name, fields, n=1)


def _problem(located: Located, message: str, kind: type[msgspec.Struct], path: Path) -> Problem:
    found = _PATH.search(message)
    message = _PATH.sub("", message)
    inner = _STEP.findall(found[1]) if found else []
    here = path + tuple(int(index) if index else name for name, index in inner)
    unknown = _UNKNOWN.search(message)
    if unknown:
        near = _near(unknown[1], _fields(kind, here))
        hint = f"; did you mean `{near[0]}`?" if near else ""
        return located.problem((*here, unknown[1]), f"Unknown field `{unknown[1]}`{hint}", key=True)
    if here and here[-1] == "kind":
        message = f"{message}. Kinds of check: {', '.join(sorted(CHECK_KINDS))}"
    return located.problem(here, _plain(message))


def _plain(message: str) -> str:
    for theirs, ours in _WORDS.items():
        message = message.replace(theirs, ours)
    return message


def _fields(kind: type[msgspec.Struct], here: Path) -> list[str]:
    """Names that the place could have; of a check, those of all checks."""
    if "check" in here:
        return sorted({name for check in CHECK_KINDS.values() for name in (*check.__struct_fields__, "kind")})
    return list(kind.__struct_fields__)


def dump_rubric(rubric: Rubric) -> str:
    """YAML without fields that have their default."""
    data = _without_defaults(rubric)
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100)


def _without_defaults(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        data = dict[str, Any]()
        tag = value.__struct_config__.tag
        if tag is not None:
            data["kind"] = tag
        for field in msgspec.structs.fields(value):
            here = getattr(value, field.name)
            default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
            if here != default:
                data[field.encode_name] = _without_defaults(here)
        return data
    if isinstance(value, tuple | list):
        return [_without_defaults(each) for each in value]
    if isinstance(value, dict):
        return {key: _without_defaults(each) for key, each in value.items()}
    return msgspec.to_builtins(value) if not hasattr(value, "as_tuple") else _number(value)


def _number(value: Any) -> int | float | str:
    whole = value == value.to_integral_value()
    return int(value) if whole else float(value) if str(float(value)) == f"{value.normalize():f}" else str(value)
