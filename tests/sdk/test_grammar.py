"""Answers that keep to a form, as agent code asks for them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

import paceline
from paceline.options import parse_options
from paceline.testing import ManualClock, Reply, ScriptedBackend
from paceline_engine.chunk import FinishReason
from paceline_engine.request import GenerationRequest


def ask(reply: str | Reply, **options: Any) -> tuple[paceline.Answer, ScriptedBackend]:
    async def main() -> tuple[paceline.Answer, ScriptedBackend]:
        clock = ManualClock()
        backend = ScriptedBackend(reply, clock=clock)
        async with (
            paceline.AsyncClient(backend=backend, clock=clock) as client,
            client.turn(slo=paceline.SLO()) as turn,
        ):
            return await turn.generate("hi", **options), backend

    return asyncio.run(main())


class City:
    """What of a pydantic model's class is used."""

    def __init__(self, name: str) -> None:
        self.name = name

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}

    @classmethod
    def model_validate_json(cls, text: str) -> City:
        return cls(json.loads(text)["name"])


def test_an_answer_to_a_schema_is_parsed() -> None:
    """With a schema the answer holds the value beside its text, and the backend gets the grammar."""
    answer, backend = ask('{"name":"Rome"}', json_schema={"type": "object"})
    assert answer.parsed == {"name": "Rome"}
    request = backend.received[0].request
    assert isinstance(request, GenerationRequest)
    assert request.grammar is not None
    assert json.loads(request.grammar.text) == {"type": "object"}


def test_a_model_class_gives_its_instance() -> None:
    """A class in pydantic's way gives the schema, and an instance of it is the parsed answer."""
    parsed = ask('{"name":"Rome"}', json_schema=City)[0].parsed
    assert isinstance(parsed, City)
    assert parsed.name == "Rome"


def test_a_text_that_was_cut_is_not_parsed() -> None:
    """Where the text is no whole document, the value is None and the finish reason tells why."""
    answer, _ = ask('{"name": "Rome"}', json_schema={}, max_tokens=1)
    assert answer.parsed is None
    assert answer.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("text", "options"), [("Rome", {"json_schema": {}}), ("a", {"regex": "[0-9]"}), ("a", {"one_of": ["b"]})]
)
def test_a_script_that_breaks_the_form_is_refused(text: str, options: dict[str, Any]) -> None:
    """A scripted reply that no backend could give is an error, so a test cannot pass on it."""
    with pytest.raises(paceline.InvalidValueError, match="script"):
        ask(text, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"json_schema": {}, "regex": "a"},
        {"json_schema": {}, "ignore_eos": True},
        {"json_schema": 3},
        {"json_schema": "{"},
        {"regex": 3},
        {"regex": ""},
        {"one_of": "yes"},
        {"one_of": []},
    ],
)
def test_forms_are_checked_before_anything_runs(options: dict[str, Any]) -> None:
    """Two forms, or one that is none, are refused with the option's name."""
    with pytest.raises(paceline.InvalidValueError) as caught:
        parse_options(options)
    assert caught.value.field in options
