"""Grammars to matchers, by llguidance (https://github.com/guidance-ai/llguidance).

It keeps an Earley parser over a lexer of derivatives of regular expressions and walks the vocabulary as a
trie, so that a mask for 262,144 tokens takes about 50 microseconds. Every step's work is bounded by its
limits, so no grammar can hold a step up.

Building the trie of a large vocabulary holds the interpreter lock for half a second, in which nothing else
can run: it belongs to a moment in which nothing else does. Compiling a grammar gives the lock back.
"""

from __future__ import annotations

import concurrent.futures
import copy
import importlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from paceline_engine.errors import InvalidValueError, MissingExtraError
from paceline_engine.grammar.base import Grammar, GrammarKind
from paceline_engine.grammar.ending import TooHeavy, find_ending, words_of
from paceline_engine.grammar.finite import without_endless
from paceline_engine.loading.base import Tokenizer

_MOST_CACHED = 64
_AWAKE_S = 2e-3
_REST_SHARE = 4.0
"""How much longer a search rests than it works while others run."""
_END_BYTE = 256
"""The token that ends, in the vocabulary of single bytes."""


@runtime_checkable
class _Table(Protocol):
    """A tokenizer that gives the bytes of all its tokens at once."""

    def all_bytes(self) -> list[bytes]: ...


class Vocabulary:
    """The tokens as a grammar library wants them, made once for each tokenizer; about a second of work."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, end_ids: Collection[int]) -> None:
        self.vocab_size = vocab_size
        self._library = _library()
        if isinstance(tokenizer, _Table):
            self._pieces = tokenizer.all_bytes()[:vocab_size]
        else:
            self._pieces = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        # Backwards, so that the first of equal tokens stays.
        self._ids = dict(zip(reversed(self._pieces), range(vocab_size - 1, -1, -1), strict=True))
        self._ids.pop(b"", None)
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

    def __init__(
        self, grammar: Grammar, vocabulary: Vocabulary, *, rest: Callable[[], None] | None = None
    ) -> None:
        """
        Args:
            rest: called again and again in between; may sleep.

        Raises:
            InvalidValueError: the grammar is not valid, not supported, too heavy, or nothing can match it.
        """
        self.grammar = grammar
        self.vocabulary = vocabulary
        self._tokens, self._bytes = vocabulary.matchers(_source(grammar))
        for matcher in (self._tokens, self._bytes):
            if matcher.is_error():
                raise _refused(grammar, matcher.get_error())
        try:
            self.ending = find_ending(
                self._bytes.deep_copy(),
                json=grammar.kind is GrammarKind.JSON_SCHEMA,
                words=_words(grammar),
                rest=rest,
            )
            """The shortest output that was found; None where the search gave up."""
        except TooHeavy as error:
            raise _refused(grammar, str(error)) from error
        found = None if self.ending is None else vocabulary.tokenize(self.ending)
        self.shortest = None if found is None else tuple(found)
        """Tokens of it."""
        if self.ending is None:
            first = self._bytes.deep_copy()
            if not any(first.compute_bitmask()) or first.is_error():
                raise _refused(grammar, "nothing can match it")

    def matchers(self) -> tuple[Any, Any]:
        """A matcher over tokens and one over bytes, both at the beginning, for one output."""
        return self._tokens.deep_copy(), self._bytes.deep_copy()


class GrammarCompiler:
    """Compiles for one model and keeps the latest grammars. May be used from several threads at once."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        end_ids: Collection[int],
        others_run: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Args:
            others_run: whether other threads have work that compiling should leave the interpreter to.
        """
        self._tokenizer = tokenizer
        self._others_run = others_run
        self._vocab_size = min(vocab_size, tokenizer.vocab_size)
        self._end_ids = frozenset(end_ids)
        self._cache: OrderedDict[Grammar, Compiled] = OrderedDict()
        self._under_way: dict[Grammar, concurrent.futures.Future[Compiled]] = {}
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._vocabulary_lock = threading.Lock()

    def prepare(self) -> Vocabulary:
        """Build what all grammars share, once. Holds the interpreter lock for most of its time.

        Raises:
            MissingExtraError: the grammar library is not installed.
        """
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(
                    self._tokenizer, vocab_size=self._vocab_size, end_ids=self._end_ids
                )
            return self._vocabulary

    def has(self, grammar: Grammar) -> bool:
        """Whether ``compile`` gives it at once."""
        with self._lock:
            return grammar in self._cache

    def compile(self, grammar: Grammar) -> Compiled:
        """The grammar, compiled, from the cache, or from another thread that compiles it now.

        Takes milliseconds for most grammars and seconds for some; after ``prepare`` other threads run on.

        Raises:
            InvalidValueError: the grammar is not valid, not supported, too heavy, or nothing can match it.
            MissingExtraError: the grammar library is not installed.
        """
        with self._lock:
            if (found := self._cache.get(grammar)) is not None:
                self._cache.move_to_end(grammar)
                return found
            other = self._under_way.get(grammar)
            mine = concurrent.futures.Future[Compiled]()
            if other is None:
                self._under_way[grammar] = mine
        if other is not None:
            error = other.exception()
            if error is not None:
                raise copy.copy(error)
            return other.result()
        try:
            compiled = Compiled(grammar, self.prepare(), rest=_Rests(self._others_run))
        except BaseException as error:
            self._end(grammar, None)
            mine.set_exception(error)
            raise
        self._end(grammar, compiled)
        mine.set_result(compiled)
        return compiled

    def _end(self, grammar: Grammar, compiled: Compiled | None) -> None:
        with self._lock:
            del self._under_way[grammar]
            if compiled is not None:
                self._cache[grammar] = compiled
            while len(self._cache) > _MOST_CACHED:
                self._cache.popitem(last=False)


class _Rests:
    """Sleeps most of the time while others run: looking for an end is Python, and so holds them up."""

    def __init__(self, others_run: Callable[[], bool]) -> None:
        self._others_run = others_run
        self._awake_since_s = time.perf_counter()

    def __call__(self) -> None:
        awake_s = time.perf_counter() - self._awake_since_s
        if awake_s < _AWAKE_S:
            return
        if self._others_run():
            time.sleep(_REST_SHARE * awake_s)
        self._awake_since_s = time.perf_counter()


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
    schema = without_endless(json.loads(grammar.text))
    return str(matcher.grammar_from_json_schema(json.dumps(schema, ensure_ascii=False), overrides=options))


def _words(grammar: Grammar) -> list[bytes]:
    """What free text of the grammar may have to hold, as it is written in an output."""
    if grammar.kind is GrammarKind.REGEX:
        return [word.encode() for word in words_of([grammar.text])]
    if grammar.kind is GrammarKind.ONE_OF:
        return []
    found = words_of(_patterns(json.loads(grammar.text)))
    return [json.dumps(word, ensure_ascii=False)[1:-1].encode() for word in found]


def _patterns(schema: Any) -> Iterator[str]:
    """Every regular expression in a schema."""
    pending = [schema]
    while pending:
        one = pending.pop()
        if isinstance(one, dict):
            if isinstance(pattern := one.get("pattern"), str):
                yield pattern
            if isinstance(named := one.get("patternProperties"), dict):
                yield from named
            pending += one.values()
        elif isinstance(one, list):
            pending += one


def _escaped(text: str) -> str:
    """The text as a regular expression."""
    return "".join(f"\\x{{{ord(letter):x}}}" if not letter.isalnum() else letter for letter in text)


def _refused(grammar: Grammar, reason: str) -> InvalidValueError:
    heavy = any(word in reason for word in ("too complex", "too large", "limit", "fuel", "max is"))
    reason = reason.partition("<state>")[0]  # what follows is for the library's authors
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
