"""Which values a field allows, found by the path that an error of msgspec names."""

import re
from functools import cache
from typing import Any

from msgspec import inspect

_PARTS = re.compile(r"\[[^]]*\]|\w+")


def allowed_values(kind: Any, path: str) -> list[str]:
    """Of the field at a path such as `messages[0].role`; empty where it is not one of a few values."""
    found = [_described(kind)]
    for part in _PARTS.findall(path):
        found = [inner for each in found for member in _members(each) for inner in _inside(member, part)]
    members = [member for each in found for member in _members(each)]
    return [str(value) for each in members if isinstance(each, inspect.LiteralType) for value in each.values]


@cache
def _described(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _members(kind: inspect.Type) -> list[inspect.Type]:
    """Of a union; else the type itself."""
    if isinstance(kind, inspect.Metadata):
        return _members(kind.type)
    if isinstance(kind, inspect.UnionType):
        return [member for each in kind.types for member in _members(each)]
    return [kind]


def _inside(kind: inspect.Type, part: str) -> list[inspect.Type]:
    if isinstance(kind, inspect.StructType):
        return [field.type for field in kind.fields if field.encode_name == part]
    if isinstance(kind, inspect.ListType | inspect.VarTupleType):
        return [kind.item_type]
    return [kind.value_type] if isinstance(kind, inspect.DictType) else []
