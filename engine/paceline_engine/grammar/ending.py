"""The shortest way from a state of a grammar to one where the output may end.

A grammar library tells which bytes may come next, not how far the end is. So the end is searched for: a
uniform-cost search (Dijkstra, 1959) over bytes, on a matcher of the same grammar whose tokens are single
bytes, where a step costs microseconds. Runs of forced bytes are taken at once. Of the ways of equal length
after which the same bytes may come, only some are followed. That can make an ending longer than it need be
or leave it unfound, but never wrong: what is found was accepted by the matcher.

Where that gives up, because letters fan out too far, a second search goes deep first, closes what it can and
tries only a few letters of each kind. Neither finds a word that free text must hold, since all letters of it
look alike until it is whole: a third search spells the words that the grammar's patterns are written with.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum, auto
from itertools import islice
from typing import Protocol

_MOST_TRIALS = 6_000
"""Bytes tried in one search."""
_QUICK_TRIALS = 1_000
"""In a search within a step; each takes about 10 microseconds."""
_MOST_ALIKE = 3
"""Ways of equal length followed further where the same bytes may come next."""
_CLOSERS = b"}]"
_FREE_TEXT = 32
"""Where a quote is allowed beside this many other bytes, it ends a string."""
_FEW = 2
"""Letters of each kind that a thin search tries."""
_MOST_WORDS = 64
_PLAIN = re.compile(r"(?:\\[^A-Za-z0-9]|[^\\()\[\]{}|*+?^$.])+")
_CLASS = re.compile(r"\\[A-Za-z0-9]")
"""Such as ``\\d``."""
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_KINDS = (b"abcdefghijklmnopqrstuvwxyz", b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", b"0123456789")


class TooHeavy(Exception):
    """The matcher has passed a limit of its library and is of no use any more; the message says which."""


class _Ways(Enum):
    """Which of the next bytes a search tries."""

    CLOSING = auto()
    """Those that close strings, arrays and objects, where they may come."""
    ALL = auto()
    DEEP = auto()
    """What closes, then other signs, then a few letters of each kind; the longest way first."""
    SPELLING = auto()
    """Whole words where something is to be written that cannot end yet; the fewest steps first."""


class ByteMatcher(Protocol):
    """A matcher over bytes: token ``i`` is byte ``i``, the last one ends."""

    def try_consume_tokens(self, tokens: list[int]) -> int: ...

    def rollback(self, num_tokens: int) -> bool: ...

    def compute_bitmask(self) -> bytes: ...

    def compute_ff_bytes(self) -> bytes: ...

    def is_accepting(self) -> bool: ...

    def is_error(self) -> bool: ...

    def get_error(self) -> str: ...


def find_ending(
    matcher: ByteMatcher,
    *,
    json: bool,
    words: Sequence[bytes] = (),
    rest: Callable[[], None] | None = None,
) -> bytes | None:
    """Bytes that lead from the matcher's state to an accepting one; None where the search gave up.

    Args:
        matcher: left in the state in which it came.
        json: first look only at ways that close strings, arrays and objects as soon as they can.
        words: what free text may have to hold, see ``words_of``.
        rest: called after each way that was looked at; may sleep.

    Raises:
        TooHeavy: a limit of the library was passed; the matcher is left broken.
    """
    for ways in _Ways:
        if (json or ways is not _Ways.CLOSING) and (
            found := _search(matcher, ways, rest, words=words, json=json)
        ) is not None:
            return found
    return None


def words_of(patterns: Iterable[str]) -> list[str]:
    """The runs of letters and signs that stand for themselves in regular expressions, and their letters."""
    runs = [
        _ESCAPED.sub(r"\1", run) for pattern in patterns for run in _PLAIN.findall(_CLASS.sub(".", pattern))
    ]
    letters = sorted({letter for run in runs for letter in run})
    return list(islice(dict.fromkeys([*runs, *letters]), _MOST_WORDS))


def quick_endings(matcher: ByteMatcher, *, json: bool) -> Iterator[bytes]:
    """Ways to an end that a step has time to look for, not always the shortest; none where none was found.

    ``matcher`` is left in the state in which it came.

    Raises:
        TooHeavy: a limit of the library was passed; the matcher is left broken.
    """
    for ways in (_Ways.DEEP, _Ways.CLOSING) if json else (_Ways.DEEP,):
        if (found := _search(matcher, ways, None, most=_QUICK_TRIALS)) is not None:
            yield found


def leads_to_end(matcher: ByteMatcher, ending: bytes) -> bool:
    """Whether ``ending`` leads from the matcher's state to an accepting one."""
    n_taken = matcher.try_consume_tokens(list(ending))
    ends = n_taken == len(ending) and matcher.is_accepting()
    matcher.rollback(n_taken)
    return ends


def _search(
    matcher: ByteMatcher,
    ways: _Ways,
    rest: Callable[[], None] | None,
    *,
    most: int = _MOST_TRIALS,
    words: Sequence[bytes] = (),
    json: bool = False,
) -> bytes | None:
    if matcher.is_accepting():
        return b""
    walk = _Walk(matcher)
    if ways is _Ways.SPELLING:
        found = _spelled(walk, matcher, rest, most, words, json)
    else:
        found = _cheapest(walk, matcher, ways, rest, most)
    walk.to(b"")
    return found


def _cheapest(
    walk: _Walk, matcher: ByteMatcher, ways: _Ways, rest: Callable[[], None] | None, most: int
) -> bytes | None:
    heap: list[tuple[int, int, bytes, bool]] = [(0, 0, b"", False)]
    seen: Counter[tuple[int, bytes]] = Counter()
    n_trials = 0
    while heap:
        _, _, path, accepting = heapq.heappop(heap)
        if accepting:
            return path
        walk.to(path)
        n_path = len(path)
        forced = matcher.compute_ff_bytes()
        for rank, byte in enumerate(forced[:1] or _next_bytes(matcher.compute_bitmask(), ways)):
            n_trials += 1
            run, ends, mask = _try(matcher, bytes([byte]))
            key = (n_path + len(run), mask)
            if run and (ends or seen[key] < _MOST_ALIKE):
                seen[key] += 1
                length = len(path + run)
                cost, rank = (-length, rank) if ways is _Ways.DEEP else (length, 0)
                heapq.heappush(heap, (cost, rank, path + run, ends))
        if n_trials > most:
            return None
        if rest is not None:
            rest()
    return None


def _spelled(
    walk: _Walk,
    matcher: ByteMatcher,
    rest: Callable[[], None] | None,
    most: int,
    words: Sequence[bytes],
    json: bool,
) -> bytes | None:
    """Best first: the most strings begun and closed, then the fewest steps since."""
    heap: list[tuple[int, int, int, bytes, bool]] = [(0, 0, 0, b"", False)]
    seen: Counter[tuple[int, int, bytes, bytes]] = Counter()
    n_trials = 0
    while heap and n_trials <= most:
        closed, n_steps, _, path, accepting = heapq.heappop(heap)
        if accepting:
            return path
        walk.to(path)
        forced = matcher.compute_ff_bytes()
        mask = matcher.compute_bitmask()
        steps = [forced[:1]] if forced else _spelled_steps(mask, words, json=json)
        for step in steps:
            n_trials += 1
            taken, ends, after = _try(matcher, step)
            closes = json and b'"' in taken
            one = (closed - closes, 0 if closes else n_steps + 1)
            key = (*one, step, after)
            if taken and (ends or seen[key] < _MOST_ALIKE):
                seen[key] += 1
                heapq.heappush(heap, (*one, n_trials, path + taken, ends))
        if rest is not None:
            rest()
    return None


def _spelled_steps(mask: bytes, words: Sequence[bytes], *, json: bool) -> list[bytes]:
    allowed = list(_set_bits(mask))
    in_text = len(allowed) > _FREE_TEXT
    if json and (not in_text or ord('"') in allowed):
        closing = _next_bytes(mask, _Ways.CLOSING)
        if in_text or len(closing) == 1 or all(byte in _CLOSERS for byte in closing):
            return [bytes([byte]) for byte in closing]
    few = _thinned(byte for byte in allowed if 0x20 <= byte < 0x7F)
    wide = [byte for byte in allowed if byte >= 0x80]
    if in_text and few:  # almost any character may come: those that must are among the words
        few = [byte for byte in few if any(byte in kind for kind in _KINDS)]
        wide = []
    fitting = [word for word in words if word[0] in allowed]
    return [*fitting, *(bytes([byte]) for byte in (*few, *wide))]


class _Walk:
    """Keeps the matcher at a path, and goes to the next one over what the two share."""

    def __init__(self, matcher: ByteMatcher) -> None:
        self._matcher = matcher
        self._path = b""

    def to(self, path: bytes) -> None:
        n_same = _n_shared(self._path, path)
        if n_back := len(self._path) - n_same:
            self._matcher.rollback(n_back)
        n_taken = self._matcher.try_consume_tokens(list(path[n_same:]))
        if n_same + n_taken != len(path):
            raise TooHeavy(self._matcher.get_error() or "a way that was walked before is closed now")
        self._path = path


def _n_shared(one: bytes, other: bytes) -> int:
    """Bytes at the beginning that are equal."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def _try(matcher: ByteMatcher, step: bytes) -> tuple[bytes, bool, bytes]:
    """What ``_take`` takes, whether that ends and what may come after it; the matcher stays where it is."""
    taken = _take(matcher, step)
    ends, mask = matcher.is_accepting(), matcher.compute_bitmask()
    matcher.rollback(len(taken))
    return taken, ends, mask


def _take(matcher: ByteMatcher, step: bytes) -> bytes:
    """Take ``step`` and what is forced after it; the bytes taken, none where it is not allowed."""
    n_taken = matcher.try_consume_tokens(list(step))
    if n_taken < len(step):
        if matcher.is_error():
            raise TooHeavy(matcher.get_error())
        matcher.rollback(n_taken)
        return b""
    forced = matcher.compute_ff_bytes()
    return step + forced[: matcher.try_consume_tokens(list(forced))]


def _next_bytes(mask: bytes, ways: _Ways) -> list[int]:
    """The bytes worth trying of those that ``mask`` allows."""
    allowed = list(_set_bits(mask))
    if ways is _Ways.CLOSING:
        in_text = len(allowed) > _FREE_TEXT
        if in_text and ord('"') in allowed:
            return [ord('"')]
        if not in_text and (closers := [byte for byte in allowed if byte in _CLOSERS]):
            return closers
        if any(byte in allowed for byte in b"0123456789"):
            if ord(",") in allowed:
                return [ord(",")]
            allowed = [byte for byte in allowed if byte != ord("-")]
    # Characters of several bytes cost more; they are tried where nothing else is allowed.
    plain = [byte for byte in allowed if 0x20 <= byte < 0x7F] or allowed
    return _thinned(plain) if ways is _Ways.DEEP else plain


def _thinned(allowed: Iterable[int]) -> list[int]:
    found = list(allowed)
    few = [byte for kind in _KINDS for byte in islice((each for each in found if each in kind), _FEW)]
    signs = [byte for byte in found if not any(byte in kind for kind in _KINDS)]
    return sorted(signs, key=lambda byte: byte not in b'"' + _CLOSERS) + few


def _set_bits(mask: bytes) -> Iterator[int]:
    for byte in range(256):
        if mask[byte >> 3] >> (byte & 7) & 1:
            yield byte
