"""Schemas that no finite text matches, and recursion that ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from paceline_engine.errors import InvalidValueError
from paceline_engine.grammar.base import Grammar

SELF = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
PAIR = {
    "$defs": {
        "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
        "b": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]},
    },
    "$ref": "#/$defs/a",
}
SPLIT = {"type": "object", "allOf": [{"properties": {"a": {"$ref": "#"}}}, {"required": ["a"]}]}
BOTH = {
    "$defs": {
        "n": {
            "anyOf": [
                {"type": "object", "properties": {"l": {"$ref": "#/$defs/n"}}, "required": ["l"]},
                {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 2},
            ]
        }
    },
    "$ref": "#/$defs/n",
}


@pytest.mark.parametrize(
    ("schema", "place", "word"),
    [
        ({"$ref": "#"}, "#", "itself"),
        (SELF, "#/properties/a", "without end"),
        (PAIR, "#/$defs/a/properties/b", "#/$defs/b/properties/a"),
        (SPLIT, "#/allOf/0/properties/a", "without end"),
        (BOTH, "#/$defs/n/anyOf/0", "without end"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#/items", "without end"),
        ({"type": "string", "minLength": 5, "maxLength": 3}, "#/minLength", "maxLength 3"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "#/minItems", "maxItems 2"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "#/minimum", "maximum 3"),
        ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4}, "#", "whole number"),
        ({"type": "number", "minimum": 3, "exclusiveMaximum": 3}, "#", "no number"),
        ({"enum": []}, "#/enum", "empty"),
        ({"type": "string", "enum": [1, None]}, "#", "string"),
        ({"type": "integer", "const": "x"}, "#", "integer"),
        ({"anyOf": []}, "#/anyOf", "empty"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "#", "no type"),
        ({"type": "object", "required": ["x"], "additionalProperties": False}, "#/required", "'x'"),
        ({"type": "object", "properties": {"x": False}, "required": ["x"]}, "#/properties/x", "false"),
        (
            {"type": "array", "prefixItems": [{"type": "integer"}], "items": False, "minItems": 2},
            "#/items",
            "false",
        ),
        (
            {
                "type": "object",
                "properties": {"a/b": {"type": "array", "minItems": 1, "items": {"enum": []}}},
                "required": ["a/b"],
            },
            "#/properties/a~1b/items/enum",
            "empty",
        ),
    ],
)
def test_what_nothing_finite_matches_is_refused_with_its_place(
    schema: dict[str, Any], place: str, word: str
) -> None:
    """The error names the place in the schema, what is wrong there and what to do."""
    with pytest.raises(InvalidValueError) as caught:
        Grammar.json_schema(schema)
    assert caught.value.field == "json_schema"
    assert caught.value.remedy.startswith(f"at {place} ")
    assert word in caught.value.remedy


TREE = {
    "$defs": {
        "n": {
            "type": "object",
            "properties": {
                "v": {"type": "integer"},
                "kids": {"type": "array", "items": {"$ref": "#/$defs/n"}},
            },
            "required": ["v", "kids"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/n",
}
ENDS = {
    "optional": {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
    "nullable": {
        "type": ["object", "null"],
        "properties": {"a": {"$ref": "#"}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "array": {"type": "array", "items": {"$ref": "#"}},
    "leaf": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1}]},
    "tree": TREE,
}


@pytest.mark.parametrize("name", list(ENDS))
def test_recursion_that_can_end_is_closed_at_any_cap(name: str, drawing: Callable[..., Any]) -> None:
    """However deep random draws have gone, the output is whole JSON within its cap."""
    one = drawing(Grammar.json_schema(ENDS[name]))
    assert one.compiled.shortest is not None
    least = len(one.compiled.shortest)
    for seed, cap in enumerate((least, least + 1, least + 3, least + 9, 40, 90)):
        text, _, tokens = one.draw(seed, cap)
        assert len(tokens) <= cap
        json.loads(text)


def test_optional_parts_without_end_are_never_begun(drawing: Callable[..., Any]) -> None:
    """An optional property, branch or item that could never be closed is left out of every output."""
    endless = {"type": "object", "properties": {"a": {"$ref": "#/$defs/e"}}, "required": ["a"]}
    schema = {
        "$defs": {"e": endless, "inner": {"type": "object", "properties": {"z": {"$ref": "#/$defs/e"}}}},
        "type": "object",
        "properties": {
            "a": {"$ref": "#/$defs/e"},
            "b": {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/e"}]},
            "c": {"type": "array", "items": {"$ref": "#/$defs/e"}},
            "d": {"$ref": "#/$defs/inner"},
        },
        "required": ["b", "c"],
        "additionalProperties": False,
    }
    one = drawing(Grammar.json_schema(schema))
    for seed in range(8):
        value = json.loads(one.draw(seed, 60)[0])
        assert set(value) <= {"b", "c", "d"}
        assert isinstance(value["b"], bool)
        assert value["c"] == []
        assert "z" not in value.get("d", {})
