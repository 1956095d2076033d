"""The shortest way from a state of a grammar to one where the output may end.

A grammar library tells which bytes may come next, not how far the end is. So the end is searched for: a
uniform-cost search (Dijkstra, 1959) over bytes, on a matcher of the same grammar whose tokens are single
bytes, where a step costs microseconds. Runs of forced bytes are taken at once. Of the ways of equal length
after which the same bytes may come, only some are followed. That can make an ending longer than it need be
or leave it unfound, but never wrong: what is found was accepted by the matcher.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from typing import Protocol

_MOST_TRIALS = 6_000
"""Bytes tried in one search."""
_MOST_ALIKE = 3
"""Ways of equal length followed further where the same bytes may come next."""
_CLOSERS = b"}]"
_FREE_TEXT = 32
"""Where a quote is allowed beside this many other bytes, it ends a string."""


class ByteMatcher(Protocol):
    """A matcher over bytes: token ``i`` is byte ``i``, the last one ends."""

    def try_consume_tokens(self, tokens: list[int]) -> int: ...

    def rollback(self, num_tokens: int) -> bool: ...

    def compute_bitmask(self) -> bytes: ...

    def compute_ff_bytes(self) -> bytes: ...

    def is_accepting(self) -> bool: ...


def find_ending(matcher: ByteMatcher, *, json: bool) -> bytes | None:
    """Bytes that lead from the matcher's state to an accepting one; None where the search gave up.

    Args:
        matcher: left in the state in which it came.
        json: first look only at ways that close strings, arrays and objects as soon as they can.
    """
    if json and (found := _search(matcher, closing=True)) is not None:
        return found
    return _search(matcher, closing=False)


def leads_to_end(matcher: ByteMatcher, ending: bytes) -> bool:
    """Whether ``ending`` leads from the matcher's state to an accepting one."""
    n_taken = matcher.try_consume_tokens(list(ending))
    ends = n_taken == len(ending) and matcher.is_accepting()
    matcher.rollback(n_taken)
    return ends


def _search(matcher: ByteMatcher, *, closing: bool) -> bytes | None:
    if matcher.is_accepting():
        return b""
    heap: list[tuple[int, bytes, bool]] = [(0, b"", False)]
    seen: Counter[tuple[int, bytes]] = Counter()
    n_trials = 0
    while heap:
        _, path, accepting = heapq.heappop(heap)
        if accepting:
            return path
        n_path = matcher.try_consume_tokens(list(path))
        assert n_path == len(path), "a way that was walked before is closed now"
        forced = matcher.compute_ff_bytes()
        for byte in forced[:1] or _next_bytes(matcher.compute_bitmask(), closing=closing):
            n_trials += 1
            run = _walk(matcher, byte)
            ends, mask = matcher.is_accepting(), matcher.compute_bitmask()
            matcher.rollback(len(run))
            key = (n_path + len(run), mask)
            if run and (ends or seen[key] < _MOST_ALIKE):
                seen[key] += 1
                heapq.heappush(heap, (n_path + len(run), path + run, ends))
        matcher.rollback(n_path)
        if n_trials > _MOST_TRIALS:
            return None
    return None


def _walk(matcher: ByteMatcher, byte: int) -> bytes:
    """Take ``byte`` and what is forced after it; the bytes taken."""
    if matcher.try_consume_tokens([byte]) == 0:
        return b""
    forced = matcher.compute_ff_bytes()
    return bytes([byte]) + forced[: matcher.try_consume_tokens(list(forced))]


def _next_bytes(mask: bytes, *, closing: bool) -> list[int]:
    """The bytes worth trying of those that ``mask`` allows."""
    allowed = list(_set_bits(mask))
    if closing:
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
    return [byte for byte in allowed if 0x20 <= byte < 0x7F] or allowed


def _set_bits(mask: bytes) -> Iterator[int]:
    for byte in range(256):
        if mask[byte >> 3] >> (byte & 7) & 1:
            yield byte
