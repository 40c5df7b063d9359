"""JSON schemas as TypeScript types, as GPT-OSS was trained to read the parameters of tools.

The layout is that of the library openai-harmony, with its peculiarities: what it does not render (`anyOf`, `$ref`) is
`any` here too, because a prompt must have the tokens that the model knows.
"""

import json
from collections.abc import Iterator
from typing import Any

_NAMES = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean"}


def typescript(schema: Any, indent: str = "") -> str:
    if isinstance(variants := _get(schema, "oneOf"), list):
        return "".join(f"\n{indent} | {_variant(each, indent)}{_variant_comment(each)}" for each in variants)
    named = _get(schema, "type")
    if isinstance(named, list):
        return " | ".join("number" if name == "integer" else name for name in named if isinstance(name, str)) or "any"
    if named == "object":
        return _object(schema, indent)
    if named == "array":
        return f"{typescript(schema['items'], indent)}[]" if "items" in schema else "Array<any>"
    if named == "string" and (choices := _enumerated(schema)):
        return " | ".join(f'"{choice}"' for choice in choices)
    return _NAMES.get(named, "any") if isinstance(named, str) else "any"


def lines(text: str) -> list[str]:
    """Split at line feeds only."""
    ended, _, rest = text.rpartition("\n")
    found = [line.removesuffix("\r") for line in ended.split("\n")] if "\n" in text else []
    return [*found, rest] if rest else found


def _object(schema: dict[str, Any], indent: str) -> str:
    comment = _text(schema, "description")
    head = "" if comment is None else f"{indent}// {comment}\n"
    properties, required = schema.get("properties"), schema.get("required")
    required = required if isinstance(required, list) else []
    members = properties.items() if isinstance(properties, dict) else ()
    body = "".join(_property(name, each, indent, name in required) for name, each in members)
    return f"{head}{{\n{body}{indent}}}"


def _property(name: str, schema: Any, indent: str, required: bool) -> str:
    label = f"{indent}{name}{'' if required else '?'}:"
    above = "".join(f"{indent}//{line}\n" for line in _comments(schema))
    if isinstance(variants := _get(schema, "oneOf"), list):
        return above + _union(label, schema, variants, indent)
    has_default = "default" in _members(schema) and "oneOf" not in schema
    comment = f" // {_default(schema, quoted=False)}" if has_default else ""
    return f"{above}{label} {_nullable(schema, indent + '    ')},{comment}\n"


def _comments(schema: Any) -> Iterator[str]:
    if (title := _text(schema, "title")) is not None:
        yield f" {title}"
        yield ""
    if _get(schema, "oneOf") is None and (description := _text(schema, "description")) is not None:
        yield f" {description}"
    if isinstance(examples := _get(schema, "examples"), list) and examples:
        yield " Examples:"
        yield from (f' - "{example}"' for example in examples if isinstance(example, str))


def _union(label: str, schema: dict[str, Any], variants: list[Any], indent: str) -> str:
    """A property with `oneOf`. A description that its first variant repeats is written once."""
    description = _text(schema, "description")
    above = description is not None and not (variants and _text(variants[0], "description") == description)
    text = f"{indent}// {description}\n" if above else ""
    if "default" in schema:
        text += f"{indent}// {_default(schema, quoted=False)}\n"
    text += f"{label}\n"
    for at, each in enumerate(variants):
        own = None if at == 0 and above else _text(each, "description")
        notes = [own] if own is not None and own != description else []
        notes += [_default(each, quoted=False)] if "default" in _members(each) else []
        comment = f" // {' '.join(notes)}" if notes else ""
        text += f"{indent} | {_variant(each, indent)}{comment}\n"
    return f"{text}{indent},\n"


def _variant(schema: Any, indent: str) -> str:
    return _nullable(schema, indent + "   ")


def _nullable(schema: Any, indent: str) -> str:
    text = typescript(schema, indent)
    return f"{text} | null" if _get(schema, "nullable") is True and "null" not in text else text


def _variant_comment(schema: Any) -> str:
    description = _text(schema, "description")
    notes = [] if description is None else [description]
    notes += [_default(schema, quoted=True)] if "default" in _members(schema) else []
    return f" // {' '.join(notes)}" if notes else ""


def _default(schema: dict[str, Any], quoted: bool) -> str:
    """`quoted`: as JSON also where it is one of the enumerated strings."""
    value = schema["default"]
    if not isinstance(value, str):
        written = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    elif not _get(schema, "enum") or not isinstance(schema["enum"], list):
        written = f'"{value}"'
    else:
        written = json.dumps(value, ensure_ascii=False) if quoted else value
    return f"default: {written}"


def _enumerated(schema: dict[str, Any]) -> list[str]:
    given = schema.get("enum")
    return [value for value in given if isinstance(value, str)] if isinstance(given, list) else []


def _members(schema: Any) -> dict[str, Any]:
    return schema if isinstance(schema, dict) else {}


def _get(schema: Any, name: str) -> Any:
    return _members(schema).get(name)


def _text(schema: Any, name: str) -> str | None:
    value = _get(schema, name)
    return value if isinstance(value, str) else None
