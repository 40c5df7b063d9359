"""Closes the objects of a JSON schema that does not say whether they may have other properties.

A model that may write any property often does not stop. llama.cpp's converter, and so Ollama, closes them too.
`"additionalProperties": true` keeps an object open, and so does a schema without `properties`. Where several schemas
describe one object (`allOf`, `anyOf` beside `properties`), none of them knows all properties: those stay as they are.
"""

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]

_MAX_DEPTH = 100  # more is not compiled
_ONE, _LISTS = ("items", "additionalProperties", "contains"), ("anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_DEFINITIONS = ("$defs", "definitions")
_SPEAKING = ("additionalProperties", "unevaluatedProperties")
_COMBINING = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "then", "else", "dependentSchemas", "not")
_OPAQUE = ("allOf", "if", "then", "else", "dependentSchemas", "not")  # with an object that is described elsewhere too


def close_objects(schema: Schema) -> Schema:
    """A copy; the schema itself stays as it is."""
    shared = _shared(schema)
    closed: Schema = _Closer(shared).close(schema, "#" not in shared)
    return closed


class _Closer:
    def __init__(self, shared: set[str]) -> None:
        self._shared = shared

    def close(self, schema: Any, whole: bool, depth: int = _MAX_DEPTH) -> Any:
        """`whole`: this schema alone describes its object."""
        if not isinstance(schema, dict) or not depth:
            return schema
        whole = whole and not _is_combined(schema)
        closed = {word: self._closed(word, value, whole, depth - 1) for word, value in schema.items()}
        silent = isinstance(schema.get("properties"), dict) and not any(word in schema for word in _SPEAKING)
        return closed | ({"additionalProperties": False} if whole and silent else {})

    def _closed(self, word: str, value: Any, whole: bool, depth: int) -> Any:
        same = whole if word in ("anyOf", "oneOf") else True  # the alternatives are about the same object
        if word in _NAMED and isinstance(value, dict):
            return {name: self.close(each, self._is_whole(word, name), depth) for name, each in value.items()}
        if word in _LISTS and isinstance(value, list):
            return [self.close(each, same, depth) for each in value]
        return self.close(value, True, depth) if word in _ONE else value

    def _is_whole(self, word: str, name: str) -> bool:
        return word not in _DEFINITIONS or f"#/{word}/{name}" not in self._shared


def _is_combined(schema: Schema) -> bool:
    """Whether other schemas describe the same object. One alone in `allOf` would be harmless, and is rare."""
    combining = [word for word in _COMBINING if word in schema]
    return bool(combining) if "properties" in schema else any(word in _OPAQUE for word in combining)


def _shared(root: Schema) -> set[str]:
    """The definitions that describe an object together with other schemas: those must not close it."""
    found: set[str] = set()
    left = [reference for part in _combined_parts(root) for reference in _references(part)]
    while left:
        reference = left.pop()
        if reference not in found:
            found.add(reference)
            left += _references(_referred(reference, root))
    return found


def _combined_parts(schema: Any) -> Iterator[Any]:
    for node in _nodes(schema):
        if _is_combined(node):
            yield from (node[word] if word != "$ref" else {"$ref": node[word]} for word in _COMBINING if word in node)


def _references(schema: Any) -> list[str]:
    return [node["$ref"] for node in _nodes(schema) if isinstance(node.get("$ref"), str)]


def _referred(reference: str, root: Schema) -> Any:
    found: Any = root
    for name in reference.removeprefix("#").split("/")[1:]:
        found = found.get(name) if isinstance(found, dict) else None
    return found if reference != "#" else None


def _nodes(schema: Any) -> Iterator[Schema]:
    """All objects within, also those that are no schemas."""
    left = [schema]
    while left:
        node = left.pop()
        if isinstance(node, dict):
            yield node
            left += node.values()
        elif isinstance(node, list):
            left += node
