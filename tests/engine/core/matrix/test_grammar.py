"""Grammars together with everything else: the output always parses, and is the one without drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="grammars need llguidance")

from paceline_engine.chunk import FinishReason
from paceline_engine.grammar.base import Grammar
from paceline_engine.request import SamplingParams

OpenCase = Callable[..., Any]
Solo = Callable[..., Any]

PROMPT = list(b'{"name":"a"} {"na')
SCHEMA = Grammar.json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 4}, "ok": {"type": "boolean"}},
        "required": ["name", "ok"],
        "additionalProperties": False,
    }
)
SAMPLINGS = {
    "penalties": SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
    "chance": SamplingParams(temperature=1.2, top_p=0.95, seed=8),
}


def test_outputs_parse_and_are_as_alone(case: Any, open_case: OpenCase, solo: Solo) -> None:
    """JSON of a schema, by every way of drawing, side by side with a stream that has no grammar."""
    bench = open_case(case)
    bench.submit("free", PROMPT, bench.plan(6), ignore_eos=True)
    for name, sampling in SAMPLINGS.items():
        bench.submit(name, PROMPT, bench.plan(20), sampling=sampling, grammar=SCHEMA)
    out = bench.run()
    assert not out.errors
    for name, sampling in SAMPLINGS.items():
        value = json.loads(out.text(name))
        assert set(value) == {"name", "ok"}
        assert isinstance(value["ok"], bool)
        assert [bench.outcome(name)] == solo(case, PROMPT, 20, sampling=sampling, grammar=SCHEMA)
    assert [bench.outcome("free")] == solo(case, PROMPT, 6, ignore_eos=True)


def test_stop_strings_cut_what_parses_so_far(case: Any, open_case: OpenCase, solo: Solo) -> None:
    """A stop string ends the output inside of the grammar, at the same token in every mode."""
    bench = open_case(case)
    sampling = SamplingParams(min_tokens=3, repetition_penalty=1.2)
    bench.submit("a", PROMPT, bench.plan(20), sampling=sampling, grammar=SCHEMA, stop=('":',))
    out = bench.run()
    expected = solo(case, PROMPT, 20, sampling=sampling, grammar=SCHEMA, stop=('":',))
    assert [bench.outcome("a")] == expected
    assert out.finish("a").reason is FinishReason.STOP
    assert out.finish("a").stop_text == '":'
    assert '":' not in out.text("a")
