"""What is refused before anything runs, and what is kept."""

from __future__ import annotations

import importlib
import json
import re
from typing import Any

import pytest

from paceline_engine.errors import InvalidValueError, MissingExtraError
from paceline_engine.grammar.base import MAX_SCHEMA_DEPTH, MAX_TEXTS, Grammar
from paceline_engine.grammar.compiler import GrammarCompiler


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        "{",
        "[1]",
        3,
        False,
        {"a": object()},
        nested(MAX_SCHEMA_DEPTH + 1),
        "[" * 100_000,
        {"enum": ["x" * 300_000]},
    ],
    ids=["cut", "array", "number", "false", "object", "deep", "brackets", "huge"],
)
def test_what_is_no_schema_or_too_much_of_one_is_refused(schema: Any) -> None:
    """No JSON, too long or nested too deeply: an error with field, limit and remedy."""
    with pytest.raises(InvalidValueError) as caught:
        Grammar.json_schema(schema)
    assert caught.value.field == "json_schema"
    assert caught.value.remedy


@pytest.mark.parametrize("texts", [[], [""], ["a", "a"], [str(i) for i in range(MAX_TEXTS + 1)]])
def test_texts_to_choose_from_are_checked(texts: list[str]) -> None:
    """None, an empty one, one twice and too many are refused."""
    with pytest.raises(InvalidValueError):
        Grammar.one_of(texts)


@pytest.mark.parametrize("make", [Grammar.regex, lambda text: Grammar.one_of([text])])
def test_lone_surrogates_are_refused(make: Any) -> None:
    """No model can write half a character, and no grammar library reads one."""
    with pytest.raises(InvalidValueError, match="whole characters"):
        make("a\ud800")


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.regex("("),
        Grammar.regex(r"(a)\1"),
        Grammar.json_schema({"type": "nothing"}),
        Grammar.json_schema({"$ref": "#/$defs/absent"}),
        Grammar.json_schema({"$ref": "https://example.com/schema.json"}),
        Grammar.json_schema({"type": "string", "pattern": "("}),
        Grammar.json_schema({"type": "object", "not": {"required": ["a"]}}),
    ],
)
def test_what_cannot_be_compiled_is_an_error_of_ours(grammar: Grammar, compiler: GrammarCompiler) -> None:
    """Bad syntax, unsupported keywords and lost references name the field to blame."""
    with pytest.raises(InvalidValueError) as caught:
        compiler.compile(grammar)
    assert caught.value.field == grammar.kind
    assert len(str(caught.value)) < 700


def test_a_large_enumeration_compiles(compiler: GrammarCompiler) -> None:
    """Two thousand texts are a grammar like any other, and the shortest is found."""
    compiled = compiler.compile(Grammar.one_of([f"option {i}" for i in range(MAX_TEXTS)]))
    assert compiled.shortest is not None
    assert len(b"".join(compiled.vocabulary.piece(token_id) for token_id in compiled.shortest)) == len(
        "option 0"
    )


def test_a_grammar_is_compiled_once(compiler: GrammarCompiler) -> None:
    """The same schema, given as an object and as text, is served from the cache."""
    first = compiler.compile(Grammar.json_schema({"type": "integer"}))
    assert compiler.compile(Grammar.json_schema('{"type":"integer"}')) is first
    for i in range(70):
        compiler.compile(Grammar.regex(f"a{{{i + 1}}}"))
    assert compiler.compile(Grammar.json_schema({"type": "integer"})) is not first


def test_without_the_library_a_grammar_names_the_extra(tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a grammar needs the grammar library; without it the error says what to install."""
    real = importlib.import_module

    def absent(name: str, *rest: Any) -> Any:
        if name == "llguidance":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", absent)
    compiler = GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size, end_ids=tokenizer.eos_token_ids)
    with pytest.raises(MissingExtraError, match="engine"):
        compiler.compile(Grammar.regex("a"))


@pytest.mark.parametrize("pattern", ["foo", "\\.com$", "日本", "^\\d+°C$", "^[^@]+@x"])
def test_a_word_that_must_come_somewhere_is_on_the_way_to_the_end(
    pattern: str, compiler: GrammarCompiler
) -> None:
    """What a pattern requires after or between free text is found, also in an object and a plain pattern."""
    text = {"type": "string", "pattern": pattern}
    both = {
        "type": "object",
        "properties": {"a": text, "b": {"type": "array", "items": text, "minItems": 2}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    for schema in (text, both):
        ending = compiler.compile(Grammar.json_schema(schema)).ending
        assert ending is not None
        value = json.loads(ending)
        for found in [value] if schema is text else [value["a"], *value["b"]]:
            assert re.search(pattern, found)
    free = "" if pattern[0] == "^" else "(.|\n)*"
    plain = free + pattern.strip("^$")
    ending = compiler.compile(Grammar.regex(plain)).ending
    assert ending is not None
    assert re.fullmatch(plain, ending.decode())
