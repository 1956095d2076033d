"""A small vocabulary that can spell everything, and outputs drawn from random logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch

pytest.importorskip("llguidance", reason="grammars need llguidance")

from paceline_engine.chunk import FinishReason
from paceline_engine.core.output import Output
from paceline_engine.grammar.base import Grammar
from paceline_engine.grammar.compiler import Compiled, GrammarCompiler
from paceline_engine.grammar.constraint import GrammarConstraint
from paceline_engine.request import SamplingParams
from paceline_engine.sampling.draw import RandomStream
from paceline_engine.sampling.rules import DrawRule
from paceline_engine.sampling.sampler import Drawn, Row, draw_tokens

_WORDS = (
    '{"',
    '":',
    '",',
    '":"',
    '","',
    '"}',
    "true",
    "name",
    "the",
    "é",
    "日本",
    "\\n",
    "00",
    "]}",
    "}}",
    "ab",
)


class ByteAndWordTokenizer:
    """Every byte is a token; ids 256 and on are words, the last one ends and the one before begins."""

    def __init__(self, words: Iterable[str] = _WORDS) -> None:
        self.pieces = [bytes([byte]) for byte in range(256)] + [word.encode() for word in words] + [b"", b""]
        self.vocab_size = len(self.pieces)
        self.bos_token_id = self.vocab_size - 2
        self.eos_token_ids: tuple[int, ...] = (self.vocab_size - 1,)
        self.has_chat_template = False

    def encode(self, text: str, *, add_bos: bool = False) -> tuple[int, ...]:
        return tuple(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]

    def render_chat(self, messages: Iterable[object], *, tools: object = None) -> tuple[int, ...]:
        raise NotImplementedError


@pytest.fixture(scope="session")
def tokenizer() -> ByteAndWordTokenizer:
    return ByteAndWordTokenizer()


@pytest.fixture(scope="session")
def compiler(tokenizer: ByteAndWordTokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size + 5, end_ids=tokenizer.eos_token_ids)


class Drawing:
    """Draws one output from random logits."""

    def __init__(self, compiled: Compiled, tokenizer: ByteAndWordTokenizer) -> None:
        self.compiled = compiled
        self.tokenizer = tokenizer

    def draw(
        self,
        seed: int,
        max_tokens: int,
        *,
        temperature: float = 1.0,
        logits: Callable[[int, torch.Tensor], None] = lambda position, logits: None,
        **params: object,
    ) -> tuple[str, FinishReason, list[int]]:
        """Text, how it ended, and the tokens."""
        ends = self.tokenizer.eos_token_ids
        constraint = GrammarConstraint(self.compiled, max_tokens=max_tokens, end_ids=ends)
        rule = DrawRule(
            SamplingParams(temperature=temperature, **params),  # type: ignore[arg-type]
            stream=RandomStream(seed=seed),
            end_ids=ends,
            constraint=constraint,
        )
        min_tokens = rule.params.min_tokens
        output = Output(
            self.tokenizer, max_tokens=max_tokens, end_ids=ends, min_tokens=min_tokens, form=constraint
        )
        generator = torch.Generator().manual_seed(seed)
        text = ""
        while output.ending is None:
            row = torch.randn(1, self.tokenizer.vocab_size + 5, generator=generator) * 3
            logits(len(output.token_ids), row[0])
            (drawn,) = draw_tokens(row, [Row(at=0, rule=rule, output_ids=output.token_ids)])
            assert isinstance(drawn, Drawn), drawn
            text += output.accept([drawn]).text
        return text, output.ending.reason, output.token_ids


@pytest.fixture
def drawing(compiler: GrammarCompiler, tokenizer: ByteAndWordTokenizer) -> Callable[[Grammar], Drawing]:
    return lambda grammar: Drawing(compiler.compile(grammar), tokenizer)
