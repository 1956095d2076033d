"""Grammars to matchers, by llguidance (https://github.com/guidance-ai/llguidance).

It keeps an Earley parser over a lexer of derivatives of regular expressions and walks the vocabulary as a
trie, so that a mask for 262,144 tokens takes about 50 microseconds. Every step's work is bounded by its
limits, so no grammar can hold a step up.
"""

from __future__ import annotations

import importlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from paceline_engine.errors import InvalidValueError, MissingExtraError
from paceline_engine.grammar.base import Grammar, GrammarKind
from paceline_engine.grammar.ending import find_ending
from paceline_engine.loading.base import Tokenizer

_MOST_CACHED = 64
_END_BYTE = 256
"""The token that ends, in the vocabulary of single bytes."""


class Vocabulary:
    """The tokens as a grammar library wants them, made once for each tokenizer; some seconds of work."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, end_ids: Collection[int]) -> None:
        self.vocab_size = vocab_size
        self._library = _library()
        self._pieces = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self._ids = {piece: token_id for token_id, piece in reversed(list(enumerate(self._pieces))) if piece}
        self._longest = max(map(len, self._ids), default=1)
        ends = sorted(token_id for token_id in end_ids if token_id < vocab_size)
        # The library needs some token to end with. One beyond the vocabulary serves where there is none.
        spare = [] if ends else [b""]
        self.tokens = self._library.LLTokenizer(
            _Wrapped(
                tokens=[b"" if place in ends else piece for place, piece in enumerate(self._pieces)] + spare,
                ends=ends or [vocab_size],
                tokenize=self.tokenize,
            ),
            eos_token=ends or [vocab_size],
            slices=[],
        )
        single = [bytes([byte]) for byte in range(256)]
        self.bytes = self._library.LLTokenizer(
            _Wrapped(tokens=[*single, b""], ends=[_END_BYTE], tokenize=list), eos_token=[_END_BYTE], slices=[]
        )

    def piece(self, token_id: int) -> bytes:
        """The bytes of one token; none for ids without a token."""
        return self._pieces[token_id] if 0 <= token_id < self.vocab_size else b""

    def tokenize(self, data: bytes) -> list[int] | None:
        """Tokens that join to ``data``, each the longest that fits; None where a byte has no token."""
        found: list[int] = []
        start = 0
        while start < len(data):
            for end in range(min(len(data), start + self._longest), start, -1):
                if (token_id := self._ids.get(data[start:end])) is not None:
                    found.append(token_id)
                    start = end
                    break
            else:
                return None
        return found

    def matchers(self, source: str) -> tuple[Any, Any]:
        """The grammar over tokens, and over single bytes."""
        make = self._library.LLMatcher
        return make(self.tokens, source, log_level=0), make(self.bytes, source, log_level=0)


class Compiled:
    """A grammar ready to be used for any number of outputs."""

    def __init__(self, grammar: Grammar, vocabulary: Vocabulary) -> None:
        """
        Raises:
            InvalidValueError: the grammar is not valid, not supported, too heavy, or nothing can match it.
        """
        self.grammar = grammar
        self.vocabulary = vocabulary
        self._tokens, self._bytes = vocabulary.matchers(_source(grammar))
        for matcher in (self._tokens, self._bytes):
            if matcher.is_error():
                raise _refused(grammar, matcher.get_error())
        if self.shortest is None:
            first = self._bytes.deep_copy()
            if not any(first.compute_bitmask()) or first.is_error():
                raise _refused(grammar, "nothing can match it")

    @cached_property
    def shortest(self) -> tuple[int, ...] | None:
        """Tokens of the shortest output that was found; None where the search gave up."""
        ending = find_ending(self._bytes.deep_copy(), json=self.grammar.kind is GrammarKind.JSON_SCHEMA)
        found = None if ending is None else self.vocabulary.tokenize(ending)
        return None if found is None else tuple(found)

    def matchers(self) -> tuple[Any, Any]:
        """A matcher over tokens and one over bytes, both at the beginning, for one output."""
        return self._tokens.deep_copy(), self._bytes.deep_copy()


class GrammarCompiler:
    """Compiles for one model and keeps the latest grammars. May be used from several threads at once."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, end_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = min(vocab_size, tokenizer.vocab_size)
        self._end_ids = frozenset(end_ids)
        self._cache: OrderedDict[Grammar, Compiled] = OrderedDict()
        self._lock = threading.Lock()
        self._vocabulary_lock = threading.Lock()

    def compile(self, grammar: Grammar) -> Compiled:
        """The grammar, compiled or from the cache. Takes milliseconds, and seconds the first time.

        Raises:
            InvalidValueError: the grammar is not valid, not supported, too heavy, or nothing can match it.
            MissingExtraError: the grammar library is not installed.
        """
        with self._lock:
            if (found := self._cache.get(grammar)) is not None:
                self._cache.move_to_end(grammar)
                return found
        with self._vocabulary_lock:
            vocabulary = self._vocabulary
        compiled = Compiled(grammar, vocabulary)
        with self._lock:
            self._cache[grammar] = compiled
            while len(self._cache) > _MOST_CACHED:
                self._cache.popitem(last=False)
        return compiled

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(self._tokenizer, vocab_size=self._vocab_size, end_ids=self._end_ids)


@dataclass(slots=True, kw_only=True)
class _Wrapped:
    """A vocabulary in the form that llguidance reads."""

    tokens: list[bytes]
    ends: list[int]
    tokenize: Callable[[bytes], list[int] | None]
    is_tokenizer_wrapper: bool = True
    bos_token_id: int | None = None

    @property
    def eos_token_id(self) -> int:
        return self.ends[0]

    @property
    def special_token_ids(self) -> list[int]:
        """What has no bytes is never part of an output."""
        return [token_id for token_id, piece in enumerate(self.tokens) if not piece]

    def __call__(self, text: str) -> list[int]:
        """What the library writes where the grammar forces a run of bytes."""
        return self.tokenize(text.encode()) or []


def _source(grammar: Grammar) -> str:
    matcher = _library().LLMatcher
    if grammar.kind is GrammarKind.REGEX:
        return str(matcher.grammar_from_regex(grammar.text))
    if grammar.kind is GrammarKind.ONE_OF:
        texts: list[str] = json.loads(grammar.text)
        return str(matcher.grammar_from_regex("|".join(map(_escaped, texts))))
    # Without free spaces most punctuation is forced, and no output can end in endless blank lines.
    options = {"whitespace_flexible": False}
    return str(matcher.grammar_from_json_schema(grammar.text, overrides=options))


def _escaped(text: str) -> str:
    """The text as a regular expression."""
    return "".join(f"\\x{{{ord(letter):x}}}" if not letter.isalnum() else letter for letter in text)


def _refused(grammar: Grammar, reason: str) -> InvalidValueError:
    heavy = any(word in reason for word in ("too complex", "too large", "limit", "fuel"))
    return InvalidValueError(
        str(grammar.kind),
        observed=grammar.text,
        limit="a form that can be compiled",
        remedy=f"{'simplify it' if heavy else 'mend it'}: {_first_lines(reason)}",
    )


def _first_lines(reason: str) -> str:
    text = " ".join(reason.split())
    return text if len(text) <= 300 else f"{text[:297]}..."


def _library() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise MissingExtraError("engine", needed_for="an output that keeps to a grammar") from error
