"""Compiling beside a step loop: once for all who ask, and resting while others run."""

from __future__ import annotations

import concurrent.futures
import json
import re
import threading
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="grammars need llguidance")

import paceline_engine.grammar.compiler as module
from paceline_engine.errors import InvalidValueError
from paceline_engine.grammar.base import Grammar
from paceline_engine.grammar.compiler import Compiled, GrammarCompiler
from paceline_engine.grammar.constraint import GrammarConstraint
from paceline_engine.sampling.constraint import ConstraintFault

MANY_FIELDS: dict[str, Any] = {
    "type": "object",
    "properties": {f"field_{i}": {"type": "string", "minLength": 1} for i in range(400)},
    "required": [f"field_{i}" for i in range(400)],
    "additionalProperties": False,
}
PATTERNS: dict[str, Any] = {
    "type": "object",
    "properties": {
        f"p{i}": {"type": "string", "pattern": "^[a-z]{3,20}(-[0-9]{4,8}){2,4}$"} for i in range(10)
    },
    "required": [f"p{i}" for i in range(10)],
    "additionalProperties": False,
}


def own_compiler(tokenizer: Any, **options: Any) -> GrammarCompiler:
    return GrammarCompiler(
        tokenizer, vocab_size=tokenizer.vocab_size, end_ids=tokenizer.eos_token_ids, **options
    )


@pytest.mark.parametrize("running", [True, False])
def test_looking_for_the_end_rests_while_others_run(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, running: bool
) -> None:
    """A long search gives most of the time to what runs beside it, and none where nothing does."""
    rests: list[float] = []
    monkeypatch.setattr(module.time, "sleep", rests.append)
    own_compiler(tokenizer, others_run=lambda: running).compile(Grammar.json_schema(MANY_FIELDS))
    assert bool(rests) is running


def test_the_vocabulary_is_built_before_the_first_grammar(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After ``prepare`` a grammar needs nothing more that is done once."""
    compiler = own_compiler(tokenizer)
    compiler.prepare()
    monkeypatch.setattr(module, "Vocabulary", lambda *a, **k: pytest.fail("built again"))
    assert compiler.compile(Grammar.regex("a")).shortest


def test_a_grammar_that_many_ask_for_is_compiled_once(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks while it is compiled gets that result, and its error where there is one."""
    began, go = threading.Event(), threading.Event()
    compiled: list[str] = []

    class Slow(Compiled):
        def __init__(self, grammar: Grammar, *rest: Any, **options: Any) -> None:
            compiled.append(grammar.text)
            began.set()
            assert go.wait(20)
            super().__init__(grammar, *rest, **options)

    monkeypatch.setattr(module, "Compiled", Slow)
    compiler = own_compiler(tokenizer)
    for text in ("ab", "("):
        began.clear()
        go.clear()
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(compiler.compile, Grammar.regex(text))]
            assert began.wait(20)
            asked += [pool.submit(compiler.compile, Grammar.regex(text)) for _ in range(3)]
            go.set()
            outcomes = [each.exception(20) or each.result() for each in asked]
        if text == "ab":
            assert len(set(map(id, outcomes))) == 1
            assert compiler.has(Grammar.regex(text))
        else:
            assert all(isinstance(outcome, InvalidValueError) for outcome in outcomes)
            assert not compiler.has(Grammar.regex(text))
    assert compiled.count("ab") == 1


def test_a_form_of_many_patterns_has_a_way_to_its_end(compiler: GrammarCompiler) -> None:
    """Ten strings of a pattern fan out too far to try all letters; a way is known all the same."""
    compiled = compiler.compile(Grammar.json_schema(PATTERNS))
    assert compiled.shortest is not None
    text = b"".join(map(compiled.vocabulary.piece, compiled.shortest)).decode()
    value = json.loads(text)
    assert set(value) == set(PATTERNS["required"])
    assert all(re.fullmatch("[a-z]{3,20}(-[0-9]{4,8}){2,4}", each) for each in value.values())


def test_a_grammar_beyond_the_library_is_refused(compiler: GrammarCompiler) -> None:
    """Too many optional fields: an error when it is compiled, since the output would be free of the form."""
    schema = {"type": "object", "properties": {f"f{i}": {"type": "string"} for i in range(1500)}}
    with pytest.raises(InvalidValueError, match="simplify it"):
        compiler.compile(Grammar.json_schema(schema))


def test_an_output_never_leaves_a_matcher_that_broke(compiler: GrammarCompiler, tokenizer: Any) -> None:
    """Where the library gives up in the middle of an output, the request ends with the reason."""
    constraint = GrammarConstraint(
        compiler.compile(Grammar.regex("a+")), max_tokens=9, end_ids=tokenizer.eos_token_ids
    )
    constraint._tokens.consume_token(ord("b"))  # breaks it, as a limit that is passed does
    with pytest.raises(ConstraintFault, match="too heavy"):
        constraint.admits([], ord("a"))
    assert not constraint.complete([ord("a")])
