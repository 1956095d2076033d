"""The state of one output in its grammar, and its landing within the tokens that are left."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline_engine.chunk import FinishReason
from paceline_engine.grammar.base import GrammarKind
from paceline_engine.grammar.compiler import Compiled
from paceline_engine.grammar.ending import TooHeavy, find_ending, leads_to_end, quick_endings
from paceline_engine.sampling.constraint import ConstraintFault

_UNKNOWN_ENDING_TOKENS = 64
"""Tokens kept for the end where no way to it was found, beside those of the last way that was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """Where the tokens that were left began to decide what is drawn."""

    position: int
    """Of the first output token that was not free."""
    cause: FinishReason
    """``length`` for the token cap, ``budget`` for the hard deadline."""
    tokens_left: int
    tokens_needed: int | None
    """To the nearest end; None where it was not found."""


class GrammarConstraint:
    """Keeps one output to its grammar, and ends it in a valid form within its limit.

    It always knows one way to the end. A drawn token is admitted when the way that is known after it fits
    the tokens that are left then; else the output follows the way known before. So once an end is within
    the limit, it stays so, whatever is drawn. Not thread-safe.

    The state follows the output that it is asked about: tokens that are no longer part of it are rolled
    back. So preemption changes nothing, and drafts may be looked at and thrown away.
    """

    def __init__(self, compiled: Compiled, *, max_tokens: int, end_ids: Collection[int]) -> None:
        self._compiled = compiled
        self._json = compiled.grammar.kind is GrammarKind.JSON_SCHEMA
        self._tokens, self._bytes = compiled.matchers()
        self._end_ids = sorted(end_ids)
        self._max_tokens = max_tokens
        self._limit = max_tokens
        self._state: list[int] = []
        """The output tokens that both matchers have taken."""
        self._endings: list[tuple[int, int, bytes]] = [(0, 0, compiled.ending or b"")]
        """Ways to the end known along the output, ascending: after how many tokens, and the bytes that had
        been taken when it was found. A roll-back brings back the way known there."""
        self._landings: dict[int, Landing] = {}

    def limit_time(self, tokens: int) -> None:
        """At most ``tokens`` output tokens in all fit before the hard deadline, as far as can be told."""
        self._limit = min(self._max_tokens, tokens)

    def mask(self, logits: torch.Tensor, output_ids: Sequence[int]) -> None:
        """See ``Constraint``. End tokens stay where the output may end here."""
        self._landings.pop(len(output_ids), None)
        if not self._follow(output_ids):
            return
        packed = np.frombuffer(self._tokens.compute_bitmask(), dtype=np.uint8)
        self._check()
        bits = np.zeros(logits.shape[0], dtype=np.bool_)
        known = np.unpackbits(packed, bitorder="little")[
            : min(len(bits), self._compiled.vocabulary.vocab_size)
        ]
        bits[: len(known)] = known
        bits[self._end_ids] = False
        goes_on = bool(bits.any())
        bits[self._end_ids] = self._tokens.is_accepting()
        allowed = torch.from_numpy(bits).to(logits.device)
        if not goes_on and self._end_ids:
            # The least number of tokens gives way where nothing but the end is left.
            ends = torch.tensor(self._end_ids, device=logits.device)
            logits[ends] = logits[ends].nan_to_num(neginf=0.0)
        logits.masked_fill_(~allowed, -torch.inf)

    def admits(self, output_ids: Sequence[int], token_id: int) -> bool:
        """See ``Constraint``: whether the way to the end after this token fits what is left."""
        if token_id in self._end_ids:
            return True
        if not self._follow([*output_ids, token_id]):
            return True
        left = self._limit - len(output_ids) - 1
        needed = self._needed(left)
        if needed is not None and needed <= left:
            return True
        if needed is None and left >= _UNKNOWN_ENDING_TOKENS + len(self._endings[-1][2]):
            return True
        self._land(output_ids)
        return False

    def way_out(self, output_ids: Sequence[int]) -> int | None:
        """See ``Constraint``."""
        if not self._follow(output_ids):
            return None
        if self._tokens.is_accepting():
            return self._end_ids[0] if self._end_ids else None
        ending = self._nearest_end(self._limit - len(output_ids))
        return None if not ending else ending[0]

    def complete(self, output_ids: Sequence[int]) -> bool:
        """Whether the output is valid and nothing can follow it."""
        try:
            return self._follow(output_ids) and self._tokens.is_accepting() and self._tokens.is_stopped()
        except ConstraintFault:
            # The next draw ends the request with it.
            return False

    def landing(self, n_output: int) -> Landing | None:
        """Where the limit first decided one of the first ``n_output`` tokens; None where it never did."""
        return min(
            (one for at, one in self._landings.items() if at < n_output),
            key=lambda one: one.position,
            default=None,
        )

    def cut_short(self, n_output: int) -> FinishReason | None:
        """What decided some of the first ``n_output`` tokens beside the model; None where nothing did."""
        landing = self.landing(n_output)
        return None if landing is None else landing.cause

    def _land(self, output_ids: Sequence[int]) -> None:
        position = len(output_ids)
        if position in self._landings:
            return
        self._follow(output_ids)
        left = self._limit - position
        by_time = self._limit < self._max_tokens
        self._landings[position] = Landing(
            position=position,
            cause=FinishReason.BUDGET if by_time else FinishReason.LENGTH,
            tokens_left=left,
            tokens_needed=self._needed(left),
        )

    def _needed(self, left: int) -> int | None:
        """Tokens to the nearest end known; looks for a nearer one where that is more than ``left``."""
        ending = self._nearest_end(left)
        return None if ending is None else len(ending)

    def _nearest_end(self, left: int) -> list[int] | None:
        if self._bytes.is_accepting():
            return []
        self._catch_up()
        n_taken = self._n_bytes()
        found = self._first_end(n_taken, left)
        if found is None:
            return None
        way, tokens = found
        # Else the way known before is kept: where this token is not admitted, the output follows it.
        if len(tokens) <= left:
            self._keep(len(self._state), n_taken, way)
        return tokens

    def _first_end(self, n_taken: int, left: int) -> tuple[bytes, list[int]] | None:
        """The first way that fits ``left`` tokens, else the shortest; None where none is found."""
        tokenize = self._compiled.vocabulary.tokenize
        nearest: tuple[bytes, list[int]] | None = None
        for way in self._ways(n_taken):
            tokens = tokenize(way)
            if tokens is None:
                continue
            if len(tokens) <= left:
                return way, tokens
            if nearest is None or len(tokens) < len(nearest[1]):
                nearest = way, tokens
        return nearest

    def _catch_up(self) -> None:
        """Find the ways of the states before this one that nobody asked for since they were rolled back to.

        A way leads on from the one a token before: without those between, none might be found here.
        """
        n_known = self._endings[-1][0] + 1
        passed = self._state[n_known:]
        if not passed:
            return
        pieces = [list(self._compiled.vocabulary.piece(token_id)) for token_id in passed]
        n_passed = sum(map(len, pieces))
        self._bytes.rollback(n_passed)
        n_taken = self._n_bytes() - n_passed
        for at, piece in enumerate(pieces, n_known):
            _, before, known = self._endings[-1]
            found = None if self._bytes.is_accepting() else self._first_end(n_taken, self._limit - at)
            self._keep(at, *((before, known) if found is None else (n_taken, found[0])))
            self._bytes.try_consume_tokens(piece)
            n_taken += len(piece)

    def _keep(self, n_tokens: int, n_taken: int, way: bytes) -> None:
        if self._endings[-1][0] == n_tokens:
            self._endings.pop()
        self._endings.append((n_tokens, n_taken, way))

    def _ways(self, n_taken: int) -> Iterator[bytes]:
        """Ways to an end, those that cost least to find first."""
        _, before, known = self._endings[-1]
        for way in (known[n_taken - before :] if n_taken >= before else b"", known):
            # What was known before is often a way still: its beginning was taken, or a string grew.
            if way and leads_to_end(self._bytes, way):
                yield way
        # Copies: a search that passes the library's limits breaks its matcher.
        with contextlib.suppress(TooHeavy):
            yield from quick_endings(self._bytes.deep_copy(), json=self._json)
        if not known:
            with contextlib.suppress(TooHeavy):
                if (found := find_ending(self._bytes.deep_copy(), json=self._json)) is not None:
                    yield found

    def _follow(self, output_ids: Sequence[int]) -> bool:
        """Bring both matchers to the state after ``output_ids``; False where the grammar forbids them."""
        state = self._state
        if state != list(output_ids[: len(state)]):
            n_same = sum(
                1
                for _ in itertools.takewhile(
                    lambda pair: pair[0] == pair[1], zip(state, output_ids, strict=False)
                )
            )
            self._roll_back(len(state) - n_same)
        for token_id in itertools.islice(output_ids, len(state), None):
            if self._tokens.try_consume_tokens([token_id]) != 1:
                self._check()
                return False
            piece = list(self._compiled.vocabulary.piece(token_id))
            n_taken = self._bytes.try_consume_tokens(piece)
            if n_taken != len(piece):
                raise ConstraintFault("the grammar's states over tokens and over bytes have come apart")
            state.append(token_id)
        return True

    def _check(self) -> None:
        """Raise ``ConstraintFault`` where the matcher has passed a limit: it would allow anything."""
        if self._tokens.is_error():
            reason = str(self._tokens.get_error()).partition("\n")[0]
            raise ConstraintFault(f"the grammar is too heavy at this place: {reason}")

    def _roll_back(self, n_tokens: int) -> None:
        if n_tokens == 0:
            return
        gone = self._state[-n_tokens:]
        del self._state[-n_tokens:]
        self._tokens.rollback(n_tokens)
        self._bytes.rollback(sum(len(self._compiled.vocabulary.piece(token_id)) for token_id in gone))
        while self._endings[-1][0] > len(self._state):
            self._endings.pop()

    def _n_bytes(self) -> int:
        return sum(len(self._compiled.vocabulary.piece(token_id)) for token_id in self._state)
