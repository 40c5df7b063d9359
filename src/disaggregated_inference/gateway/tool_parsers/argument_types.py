"""Turns bare text into JSON of the type that the tool's schema requires."""

import ast
import json
from typing import Any

from disaggregated_inference.gateway.tool_parsers.json_object import strict_json

_KINDS: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "boolean": bool,
    "null": type(None),
    "integer": int,
    "number": (int, float),
    "string": str,
}
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_MAX_STEPS = 8  # references may be circular


def types_of(schema: Any, root: Any, steps: int = _MAX_STEPS) -> set[str]:
    """The JSON types that a schema allows; empty if it does not say."""
    if not isinstance(schema, dict) or not steps:
        return set()
    if isinstance(schema.get("$ref"), str):
        return types_of(_referred(schema["$ref"], root), root, steps - 1)
    if "type" in schema:
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return {name for name in named if isinstance(name, str)}
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    found = {name for name in _KINDS for value in _items(values) if _is(value, name)}
    parts = [part for word in ("anyOf", "oneOf", "allOf") for part in _items(schema.get(word))]
    return found.union(*(types_of(part, root, steps - 1) for part in parts))


def typed(text: str, types: set[str]) -> str:
    """As JSON: a string if nothing else is allowed, or if the text is not of an allowed type."""
    written = _PYTHON.get(text.strip(), text.strip())
    try:
        value = strict_json(written)
    except ValueError:
        return (_python_literal(written) if types & {"array", "object"} else None) or json.dumps(
            text, ensure_ascii=False
        )
    if any(_is(value, name) for name in types - {"string"}):
        return written
    return json.dumps(text, ensure_ascii=False)


def _python_literal(text: str) -> str | None:
    """Qwen3-Coder's template shows lists of former calls as Python writes them, so the model does it too."""
    try:
        value = ast.literal_eval(text)
        return json.dumps(value, ensure_ascii=False, allow_nan=False) if isinstance(value, list | dict) else None
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()  # JSON Schema counts 5.0 as one
    return isinstance(value, _KINDS.get(name, ()))


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _referred(reference: str, root: Any) -> Any:
    """Only references within the schema are resolved."""
    found = root
    for name in reference.removeprefix("#").split("/")[1:]:
        found = found.get(name) if isinstance(found, dict) else None
    return found
