"""Schemas that a grammar would only seem to honour are found."""

from __future__ import annotations

from typing import Any

import pytest

from dlite_agent.decode.schema import unenforced

FIELD = {"type": "integer"}


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"not": FIELD}, "schema.not"),
        ({"type": "array", "uniqueItems": True}, "schema.uniqueItems"),
        ({"properties": {"a": {"if": {}, "then": {}}}}, "schema.properties.a.if"),
        ({"$defs": {"x": {"contains": {}}}}, "schema.$defs.x.contains"),
        ({"anyOf": [FIELD, {"dependentRequired": {}}]}, "schema.anyOf[1].dependentRequired"),
        ({"items": {"allOf": [FIELD, FIELD]}}, "schema.items.allOf"),
        ({"additionalProperties": {"pattern": "a", "maxLength": 3}}, "schema.additionalProperties.pattern"),
        ({"properties": {"a": {"$ref": "#/$defs/x", "minimum": 3}}}, "schema.properties.a.$ref"),
    ],
)
def test_the_first_keyword_is_named(schema: dict[str, Any], path: str) -> None:
    found = unenforced(schema)
    assert found is not None
    assert found.split(" ")[0] == path


def test_depth_is_bounded() -> None:
    schema: dict[str, Any] = {}
    for _ in range(64):
        schema = {"items": schema}
    assert unenforced(schema) is None
    for _ in range(5000):
        schema = {"items": schema}
    assert "nested deeper" in str(unenforced(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        {"properties": {"not": FIELD, "if": FIELD, "uniqueItems": FIELD}, "required": ["not"]},
        {"type": "array", "uniqueItems": False, "items": True},
        {"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": FIELD}},
        {"$ref": "#/$defs/x", "description": "d", "default": 1, "$defs": {"x": FIELD}},
        {"enum": [{"not": 1}], "default": {"if": 1}, "minimum": 3, "format": "email"},
        {"pattern": "a"},
    ],
)
def test_ordinary_schemas_pass(schema: Any) -> None:
    assert unenforced(schema) is None
