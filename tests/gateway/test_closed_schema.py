"""Which objects of a schema are closed, and which stay as they are."""

from typing import Any

import pytest

from disaggregated_inference.gateway.closed_schema import close_objects

TEXT: Any = {"type": "string"}
NO_MORE: Any = {"additionalProperties": False}


def an_object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def test_objects_at_every_place_are_closed() -> None:
    inner, closed = an_object(b=TEXT), an_object(b=TEXT) | NO_MORE
    for place in (
        lambda schema: an_object(a=schema),
        lambda schema: {"type": "array", "items": schema},
        lambda schema: {"type": "array", "prefixItems": [schema, schema]},
        lambda schema: {"anyOf": [schema, {"type": "null"}]},
        lambda schema: {"oneOf": [schema]},
        lambda schema: {"type": "object", "additionalProperties": schema},
        lambda schema: {"$ref": "#/$defs/x", "$defs": {"x": schema}},
        lambda schema: {"$ref": "#/definitions/x", "definitions": {"x": schema}},
        lambda schema: {"type": ["object", "null"], "patternProperties": {"^x": schema}},
    ):
        outer: Any = place
        expected = outer(closed)
        assert close_objects(outer(inner)) == expected | (NO_MORE if "properties" in expected else {})
    assert "additionalProperties" not in inner, "the schema itself stays as it is"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        an_object(a=TEXT) | {"additionalProperties": True},
        an_object(a=TEXT) | {"additionalProperties": {"type": "integer"}},
        an_object(a=TEXT) | {"unevaluatedProperties": False},
        {"allOf": [an_object(a=TEXT), an_object(b=TEXT)]},
        an_object(a=TEXT) | {"anyOf": [an_object(b=TEXT), an_object(c=TEXT)]},
        an_object(a=TEXT) | {"if": an_object(a=TEXT), "then": an_object(b=TEXT)},
        {"allOf": [{"$ref": "#/$defs/a"}, an_object(b=TEXT)], "$defs": {"a": an_object(a=TEXT)}},
        an_object(a=TEXT) | {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": an_object(b=TEXT)}},
        {"const": {"properties": {"a": 1}}},
        {"enum": [{"properties": {}}], "default": {"properties": {}}},
        {"properties": 5, "items": "x", "anyOf": 7, "$defs": [], "allOf": None},
    ],
)
def test_what_speaks_or_is_described_elsewhere_stays(schema: Any) -> None:
    assert close_objects(schema) == schema


def test_a_property_may_have_the_name_of_a_keyword() -> None:
    schema = an_object(properties=TEXT, allOf=TEXT, additionalProperties=TEXT)
    assert close_objects(schema) == schema | NO_MORE


def test_recursive_and_deep_schemas_end() -> None:
    tree = an_object(children={"type": "array", "items": {"$ref": "#"}})
    assert close_objects(tree) == tree | NO_MORE
    deep: Any = TEXT
    for _ in range(5000):
        deep = {"items": deep}
    assert "items" in close_objects(deep)
