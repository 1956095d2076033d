"""Random schemas at random caps: every output is whole JSON that is valid against its schema."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from paceline_engine.errors import InvalidValueError
from paceline_engine.grammar.base import Grammar

_DEFINED = {"$ref": "#/$defs/node"}


def random_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    """A schema of a few levels, which may point to one definition of the root's."""
    kinds = ["boolean", "integer", "string", "enum", "null"]
    kind = rng.choice([*kinds, "object", "array", "anyOf", "ref"] if depth else kinds)
    match kind:
        case "integer":
            least = rng.randint(-5, 5)
            return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 300)}
        case "string":
            least = rng.randint(0, 3)
            return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 6)}
        case "enum":
            return {"enum": rng.sample(["a", "bc", 1, None, True, "é", [1], {"k": 2}], rng.randint(1, 3))}
        case "object":
            names = rng.sample(["a", "name", "true", "é"], rng.randint(0, 3))
            return {
                "type": "object",
                "properties": {name: random_schema(rng, depth - 1) for name in names},
                "required": [name for name in names if rng.random() < 0.6],
                "additionalProperties": False,
            }
        case "array":
            least = rng.choice([0, 0, 1, 2])
            items = random_schema(rng, depth - 1)
            return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randint(0, 3)}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
        case "ref":
            return dict(_DEFINED)
        case _:
            return {"type": kind}


def fits(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """Whether the value is valid, for the keywords that ``random_schema`` writes."""
    if "$ref" in schema:
        return fits(value, root["$defs"]["node"], root)
    if "anyOf" in schema:
        return any(fits(value, branch, root) for branch in schema["anyOf"])
    if "enum" in schema:
        return any(json.dumps(value) == json.dumps(known) for known in schema["enum"])
    match schema["type"]:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            whole = isinstance(value, int) and not isinstance(value, bool)
            return whole and schema["minimum"] <= value <= schema["maximum"]
        case "string":
            return isinstance(value, str) and schema["minLength"] <= len(value) <= schema["maxLength"]
        case "array":
            in_range = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
            return in_range and all(fits(item, schema["items"], root) for item in value)
        case _:
            known = schema["properties"]
            return (
                isinstance(value, dict)
                and set(schema["required"]) <= set(value) <= set(known)
                and all(fits(item, known[name], root) for name, item in value.items())
            )


@pytest.mark.parametrize("block", range(10))
def test_random_schemas_are_kept_to_at_every_cap(block: int, drawing: Callable[..., Any]) -> None:
    """With penalties, bias and a least number of tokens or not, from the least cap that is accepted on."""
    n_refused = 0
    for number in range(20):
        rng = random.Random(block * 100 + number)
        schema = {"$defs": {"node": random_schema(rng, 2)}} | random_schema(rng, 2)
        try:
            one = drawing(Grammar.json_schema(schema))
        except InvalidValueError:
            n_refused += 1  # it needs itself without end
            continue
        assert one.compiled.shortest is not None, schema
        least = len(one.compiled.shortest)
        for cap in (least, least + rng.randint(1, 4), least + rng.randint(5, 40)):
            options = rng.choice(
                [
                    {},
                    {"min_tokens": rng.randint(1, 6)},
                    {"logit_bias": {ord("["): 9.0, ord("{"): 9.0, ord("a"): -9.0}},
                    {"repetition_penalty": 1.4},
                ]
            )
            text, _, tokens = one.draw(rng.randint(0, 999), cap, **options)
            assert len(tokens) <= cap
            assert fits(json.loads(text), schema, schema), (schema, text)
    assert n_refused < 8
