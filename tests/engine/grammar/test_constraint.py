"""Outputs drawn under a grammar from random logits, the hardest that a model could do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline_engine.chunk import FinishReason
from paceline_engine.grammar.base import Grammar
from paceline_engine.grammar.compiler import GrammarCompiler
from paceline_engine.grammar.constraint import GrammarConstraint

Valid = Callable[[Any], bool]

ORDER = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "count": {"type": "integer"},
        "state": {"enum": ["open", "closed", "on its way"]},
        "lines": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/line"}},
        "note": {"type": ["string", "null"]},
    },
    "required": ["name", "count", "state", "lines"],
    "additionalProperties": False,
    "$defs": {
        "line": {
            "type": "object",
            "properties": {
                "code": {"type": "string", "pattern": "^[A-Z]{3}[0-9]+$"},
                "paid": {"type": "boolean"},
            },
            "required": ["code", "paid"],
            "additionalProperties": False,
        }
    },
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "number"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["value", "children"],
            "additionalProperties": False,
        }
    },
}
ANYTHING: dict[str, Any] = {}
STRINGS = {"type": "array", "items": {"type": "string"}, "minItems": 2}
EITHER = {
    "anyOf": [
        {"type": "string", "minLength": 40},
        {"type": "null"},
        {"type": "array", "items": {"type": "boolean"}},
    ]
}


def is_order(value: Any) -> bool:
    return (
        isinstance(value["name"], str)
        and len(value["name"]) <= 30
        and isinstance(value["count"], int)
        and value["state"] in ("open", "closed", "on its way")
        and len(value["lines"]) >= 1
        and all(
            re.fullmatch("[A-Z]{3}[0-9]+", line["code"]) and line["paid"] in (True, False)
            for line in value["lines"]
        )
        and set(value) <= {"name", "count", "state", "lines", "note"}
    )


def is_tree(value: Any) -> bool:
    return isinstance(value["value"], int | float) and all(map(is_tree, value["children"]))


SCHEMAS: list[tuple[Any, Valid]] = [
    (ORDER, is_order),
    (TREE, is_tree),
    (ANYTHING, lambda value: True),
    (STRINGS, lambda value: len(value) >= 2 and all(isinstance(item, str) for item in value)),
    (EITHER, lambda value: value is None or isinstance(value, list) or len(value) >= 40),
]
NAMES = ["order", "tree", "anything", "strings", "either"]


@pytest.mark.parametrize(("schema", "valid"), SCHEMAS, ids=NAMES)
def test_every_output_is_valid_under_every_cap(schema: Any, valid: Valid, drawing) -> None:
    """Random logits give a valid document at every token cap from the shortest that can hold one."""
    draws = drawing(Grammar.json_schema(schema))
    shortest = len(draws.compiled.shortest)
    for cap in [*range(shortest, shortest + 7), shortest + 40]:
        for seed in range(2):
            text, reason, ids = draws.draw(seed, cap, temperature=float(seed))
            assert valid(json.loads(text)), (cap, seed, text)
            assert len(ids) <= cap
            assert reason in (FinishReason.STOP, FinishReason.LENGTH)


@pytest.mark.parametrize(
    "pattern", [r"[0-9]{4}-[0-9]{2}", r"(ab|c)*d", r"[a-z]{3,}!", r"(é|日本)+\n?", r'[a-z"]+x']
)
def test_every_output_matches_the_regular_expression(pattern: str, drawing) -> None:
    """Random logits give a full match at every token cap from the shortest on."""
    draws = drawing(Grammar.regex(pattern))
    shortest = len(draws.compiled.shortest)
    for cap in range(shortest, shortest + 20):
        text, _, _ = draws.draw(cap, cap)
        assert re.fullmatch(pattern, text), (cap, text)


def test_an_output_is_one_of_the_texts(drawing) -> None:
    """Of texts, beginnings of one another among them, every one can come and nothing else."""
    texts = ["yes", "yes, please", "no", "ja\n", 'a "b" \\ {c}', "日本語"]
    draws = drawing(Grammar.one_of(texts))
    assert {draws.draw(seed, 24)[0] for seed in range(60)} == set(texts)
    assert draws.compiled.shortest is not None
    assert draws.draw(0, len(draws.compiled.shortest))[0] == "no"


def test_a_landing_is_told_as_a_cut(drawing) -> None:
    """An output that the cap brought to its end finishes with length, one that ended by itself with stop."""
    draws = drawing(Grammar.json_schema(STRINGS))

    def only_letters(position: int, logits: torch.Tensor) -> None:
        logits[ord("a") : ord("z")] += 100

    text, reason, ids = draws.draw(0, 40, logits=only_letters)
    assert (reason, len(ids)) == (FinishReason.LENGTH, 40)
    assert len(json.loads(text)[0]) > 20
    assert draws.draw(0, 40, logits=lambda position, logits: logits[ord('"') : ord('"') + 1].add_(100))[
        1
    ] == (FinishReason.STOP)


def test_nothing_is_steered_while_there_is_room(drawing) -> None:
    """Under a cap that is far away the tokens are those of a cap that is farther."""
    draws = drawing(Grammar.json_schema(ORDER))
    for seed in range(2):
        far = draws.draw(seed, 4000)
        assert far[1] is FinishReason.STOP
        assert draws.draw(seed, 8000) == far


def test_an_output_ends_with_its_last_token(drawing) -> None:
    """Where nothing can follow, the output ends at once, without an end token."""
    text, reason, ids = drawing(Grammar.json_schema({"const": "ab"})).draw(0, 50)
    assert (text, reason) == ('"ab"', FinishReason.STOP)
    assert 267 + 256 not in ids


def test_end_tokens_come_only_where_the_output_may_end(drawing, tokenizer) -> None:
    """However likely the end token, it is drawn only after a match."""

    def ending(position: int, logits: torch.Tensor) -> None:
        logits[list(tokenizer.eos_token_ids)] = 1e9

    text, reason, ids = drawing(Grammar.regex("[a-z]{5,}")).draw(0, 50, logits=ending)
    assert (reason, ids[-1]) == (FinishReason.STOP, tokenizer.eos_token_ids[0])
    assert len(text) - len(tokenizer.token_bytes(ids[-2])) < 5 <= len(text)


def test_the_end_of_a_grammar_comes_before_min_tokens(drawing) -> None:
    """A least number of tokens lengthens what may be longer, and never an output that is complete."""
    assert drawing(Grammar.one_of(["no"])).draw(0, 50, min_tokens=20)[:2] == ("no", FinishReason.STOP)
    assert len(drawing(Grammar.regex("[a-z]+")).draw(0, 50, min_tokens=20)[2]) >= 20


@pytest.mark.parametrize(
    "params", [{"top_k": 3}, {"top_p": 0.2}, {"repetition_penalty": 5.0}, {"frequency_penalty": 9.0}]
)
def test_other_sampling_parameters_hold_beside_a_grammar(params: dict[str, Any], drawing) -> None:
    """Penalties and cut-offs apply, and the output is valid all the same."""
    draws = drawing(Grammar.json_schema(ORDER))
    assert is_order(json.loads(draws.draw(3, 90, **params)[0]))


def test_a_bias_that_forbids_what_the_grammar_needs_yields(drawing) -> None:
    """A token with the largest negative bias is drawn where it alone is allowed."""
    bias = {ord('"'): -1e30, ord("{"): -1e30, ord("}"): -1e30}
    assert is_order(json.loads(drawing(Grammar.json_schema(ORDER)).draw(3, 90, logit_bias=bias)[0]))


def mask_of(constraint: GrammarConstraint, output: list[int], size: int) -> list[int]:
    logits = torch.zeros(size)
    constraint.mask(logits, output)
    return torch.isfinite(logits).nonzero().flatten().tolist()


def test_the_mask_depends_on_the_output_alone(compiler: GrammarCompiler, tokenizer) -> None:
    """Looking ahead along drafts, and back again after they were thrown away, gives the same masks."""
    compiled = compiler.compile(Grammar.json_schema(ORDER))
    size = tokenizer.vocab_size
    output = list(b'{"name":"ab","count":12,"state":"open","lines":[{"code":"ABC1')

    def fresh() -> GrammarConstraint:
        return GrammarConstraint(compiled, max_tokens=200, end_ids=tokenizer.eos_token_ids)

    expected = [mask_of(fresh(), output[:n], size) for n in range(len(output))]
    one = fresh()
    for order in (range(len(output)), reversed(range(len(output))), [5, 40, 3, 39, 38, 60, 0]):
        for n in order:
            assert mask_of(one, output[:n], size) == expected[n]
    drafts = [*output[:20], *b"ab"]
    assert len(mask_of(one, drafts, size)) == size, "after a draft that is not allowed nothing is masked"
    assert mask_of(one, output[:20], size) == expected[20]


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (Grammar.regex(r"claim-[0-9]{2,40}: [a-z ]+\."), b"claim-1234567"),
        (Grammar.json_schema(ORDER), b'{"name":"ab","count":12,"state":"open"'),
    ],
)
def test_the_way_to_the_end_depends_on_the_output_alone(
    grammar: Grammar, text: bytes, compiler: GrammarCompiler, tokenizer
) -> None:
    """Ways found along drafts that were thrown away neither replace nor hide those of the output."""
    compiled = compiler.compile(grammar)
    plain, drafted = [
        GrammarConstraint(compiled, max_tokens=150, end_ids=tokenizer.eos_token_ids) for _ in range(2)
    ]
    for n in range(len(text) - 6):
        for at in range(n, n + 6):
            assert drafted.admits(list(text[:at]), text[at])
        assert plain.admits(list(text[:n]), text[n])
        mask_of(drafted, [], tokenizer.vocab_size)
        way = plain.way_out(list(text[: n + 1]))
        assert way is not None
        assert drafted.way_out(list(text[: n + 1])) == way


def test_what_follows_a_forbidden_draft_is_not_judged(compiler: GrammarCompiler, tokenizer) -> None:
    """A draft that the grammar forbids, or one past its end, raises nothing."""
    compiled = compiler.compile(Grammar.one_of(["no"]))
    constraint = GrammarConstraint(compiled, max_tokens=5, end_ids=tokenizer.eos_token_ids)
    assert constraint.admits([ord("x")], ord("y"))
    assert constraint.way_out([ord("x")]) is None
    assert not constraint.complete([ord("n"), ord("o"), ord("o")])
    assert not constraint.complete([ord("n"), tokenizer.eos_token_ids[0]])
    assert constraint.complete([ord("n"), ord("o")])


def test_tokens_beyond_the_vocabulary_are_never_allowed(compiler: GrammarCompiler, tokenizer) -> None:
    """Rows of the output matrix without a token, and control tokens, are masked everywhere."""
    compiled = compiler.compile(Grammar.regex("(.|\n)*"))
    constraint = GrammarConstraint(compiled, max_tokens=50, end_ids=tokenizer.eos_token_ids)
    allowed = mask_of(constraint, [], tokenizer.vocab_size + 5)
    assert max(allowed) == tokenizer.eos_token_ids[0]
    assert tokenizer.bos_token_id not in allowed


def test_a_deadline_lands_as_a_cap_does(compiler: GrammarCompiler, tokenizer) -> None:
    """Told that few tokens fit before a hard deadline, the output ends in them, as cut by the budget."""
    compiled = compiler.compile(Grammar.json_schema(STRINGS))
    constraint = GrammarConstraint(compiled, max_tokens=500, end_ids=tokenizer.eos_token_ids)
    output = list(b'["abcdef')
    assert constraint.admits(output, ord("g"))
    constraint.limit_time(len(output) + 3)
    assert not constraint.admits(output, ord("g"))
    while not constraint.complete(output):
        way = constraint.way_out(output)
        assert way is not None
        output.append(way)
    assert json.loads(tokenizer.decode(output)) == ["abcdef", ""]
    assert constraint.cut_short(len(output)) is FinishReason.BUDGET
    landing = constraint.landing(len(output))
    assert landing is not None
    assert (landing.position, landing.tokens_left, landing.tokens_needed) == (8, 3, 3)
