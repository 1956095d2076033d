"""The step policy: prompts by least slack, in chunks that leave running streams their TPOT."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from paceline_engine.schedule.base import SequenceView, StepDecision, StepState
from paceline_policies.pacing.governor import govern
from paceline_policies.pacing.numbers import StepNumbers
from paceline_policies.pacing.speeds import Speeds

PATIENCE_S = 10.0
"""Work that has no due time, or has missed it, is due this long after it was submitted."""
LEAST_CHUNK_TOKENS = 8
"""Prompt tokens that run in every step, whatever the streams beside them."""
_STRETCH = 2.0
"""A stream whose target decoding alone would break is slowed by prefill to this factor at most."""
_MARGIN = 0.9
"""Share of the time left before a token is due that a step may be predicted to take."""


class Pacer:
    """Implements ``paceline_engine.schedule.base.StepPolicy``.

    What it decides follows from the state, the numbers and the last passes' durations alone: what is to be
    known of a stream stands in its view, so that a policy may be replaced between any two steps.
    """

    def __init__(self, numbers: StepNumbers) -> None:
        self._speeds = Speeds(numbers)

    def decide_step(self, state: StepState) -> StepDecision:
        self._speeds.observe(state.previous)
        moves = govern(state, self._speeds)
        ordered = self._ordered(state)
        return StepDecision(
            prefill_order=tuple(view.key for view in ordered),
            prefill_tokens=self._chunk_tokens(state, ordered),
            variants={move.key: move.to for move in moves},
            reasons={move.key: move.why for move in moves},
        )

    def _ordered(self, state: StepState) -> list[SequenceView]:
        """Least slack first (Mok, 1983); nothing starves, since what waits past its patience goes first."""

        def key(view: SequenceView) -> tuple[float, int]:
            needs_s = self._speeds.prefill_s(view, chunk_tokens=state.max_prefill_tokens)
            return slack_s(view, now_s=state.now_s, needs_s=needs_s), view.arrival

        return sorted(state.prefilling, key=key)

    def _chunk_tokens(self, state: StepState, ordered: Sequence[SequenceView]) -> int:
        """The largest chunk with which no running stream is predicted to get its next token late."""
        most = min(state.max_prefill_tokens, sum(view.remaining_tokens for view in ordered))
        if most < 1 or not state.decoding or not self._speeds.known:
            return max(1, state.max_prefill_tokens)
        allowed_s = self._allowed_s(state)
        if math.isinf(allowed_s):
            return state.max_prefill_tokens

        def fits(n_tokens: int) -> bool:
            prefills = _cut(ordered, n_tokens)
            return self._speeds.step_s(state.decoding, prefills=prefills) <= allowed_s

        low, high = min(LEAST_CHUNK_TOKENS, most), most
        if fits(high):
            return high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _allowed_s(self, state: StepState) -> float:
        """How long the step may take before the first stream's next token is due."""
        targeted = [view for view in state.decoding if view.plan.tpot_target_s is not None]
        if not targeted:
            return math.inf
        alone_s = self._speeds.step_s(state.decoding)
        found: list[float] = []
        for view in targeted:
            assert view.plan.tpot_target_s is not None
            per_step = self._speeds.tokens_per_step(view, view.variant)
            target_s = max(view.plan.tpot_target_s * per_step, _STRETCH * alone_s)
            last_s = view.last_token_at_s if view.last_token_at_s is not None else state.now_s
            found.append(_MARGIN * (last_s + target_s - state.now_s))
        return min(found)


def slack_s(view: SequenceView, *, now_s: float, needs_s: float) -> float:
    """Time that a prompt can still wait.

    Its first token's due time counts, else its deadline, where it can still be met; what is late already
    must not push back what is not, and becomes due with its patience.
    """
    for due_s in (view.plan.first_token_by_s, view.plan.deadline_at_s):
        if due_s is not None and due_s - now_s - needs_s >= 0:
            return due_s - now_s - needs_s
    return view.submitted_at_s + PATIENCE_S - now_s - needs_s


def _cut(ordered: Sequence[SequenceView], n_tokens: int) -> Iterator[tuple[SequenceView, int]]:
    """As the engine hands out a chunk: each prompt in turn, as much as is left."""
    for view in ordered:
        if n_tokens < 1:
            return
        taken = min(n_tokens, view.remaining_tokens)
        n_tokens -= taken
        yield view, taken
