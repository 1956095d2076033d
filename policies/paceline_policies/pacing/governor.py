"""Which variant each running stream should have: faster while it runs behind, back when it is ahead.

A stream can afford ``needed`` seconds for each token that is left:

    to its deadline     (deadline - now) / tokens left to the cap
    to its TPOT target  (first token + target · (tokens so far - 1 + h) - now) / h

the latter over the next h = 32 tokens at most, so that a slow spell is caught up soon, and not by the end
of an answer that may never get there. Its own token times are in ``now``. A stream is behind where the
predicted seconds per token exceed that.

Streams of one variant that are behind move together: a pass of its own for one of them would only add
work. What is ahead goes back up only where everything that runs would keep a fifth of its time to spare,
and not before 8 · 2^n tokens after the n-th change, so that the number of changes grows with the logarithm
of an answer's length whatever the predictions do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from paceline_engine.mode import Variant
from paceline_engine.schedule.base import SequenceKey, SequenceView, StepState
from paceline_policies.pacing.speeds import Speeds

_HORIZON_TOKENS = 32
_MARGIN = 0.8
"""Share of the affordable time that a step up may be predicted to take."""
_WORTHWHILE = 0.97
"""A move must make the step shorter than this share of what it takes now."""
_DWELL_TOKENS = 8
_MOST_DOUBLINGS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One stream's change of variant."""

    key: SequenceKey
    to: Variant
    why: str


def govern(state: StepState, speeds: Speeds) -> tuple[Move, ...]:
    """The streams to move before this step; none where nothing is known of the machine."""
    streams = [view for view in state.decoding if _may_move(view)]
    if not streams or not speeds.known:
        return ()
    step_s = speeds.step_s(state.decoding)
    behind: list[SequenceView] = []
    ahead: list[SequenceView] = []
    for view in streams:
        late = _pace_s(view, view.variant, step_s, speeds) > needed_s(view, state.now_s)
        (behind if late else ahead).append(view)
    moves = [move for group in _groups(behind) for move in _down(group, state, speeds, step_s)]
    if not moves and not behind:
        rested = [view for view in ahead if _rested(view)]
        moves = [move for group in _groups(rested) for move in _up(group, state, speeds)]
    return tuple(moves)


def needed_s(view: SequenceView, now_s: float) -> float:
    """Seconds per token that the stream can afford; infinite without budgets, negative when too late."""
    plan, made = view.plan, view.output_tokens
    left = max(1, plan.max_tokens - made)
    found = [math.inf]
    if plan.deadline_at_s is not None:
        found.append((plan.deadline_at_s - now_s) / left)
    if plan.tpot_target_s is not None and view.first_token_at_s is not None:
        horizon = min(left, _HORIZON_TOKENS)
        due_s = view.first_token_at_s + plan.tpot_target_s * (made - 1 + horizon)
        found.append((due_s - now_s) / horizon)
    return min(found)


def _may_move(view: SequenceView) -> bool:
    return bool(view.plan.fallback_variants) and not view.variant_held and view.variant in _ladder(view)


def _ladder(view: SequenceView) -> tuple[Variant, ...]:
    """The variants that it may run with, the planned one first."""
    return (view.plan.mode.variant, *view.plan.fallback_variants)


def _rested(view: SequenceView) -> bool:
    dwell = _DWELL_TOKENS << min(view.variant_changes, _MOST_DOUBLINGS)
    return view.output_tokens - view.variant_since_tokens >= dwell


def _groups(views: Iterable[SequenceView]) -> list[list[SequenceView]]:
    """Streams that run alike and may be moved alike."""
    found: dict[tuple[Variant, tuple[Variant, ...]], list[SequenceView]] = {}
    for view in views:
        found.setdefault((view.variant, _ladder(view)), []).append(view)
    return list(found.values())


def _down(group: Sequence[SequenceView], state: StepState, speeds: Speeds, step_s: float) -> list[Move]:
    """To the best variant with which all of the group catch up, else to the fastest."""
    ladder = _ladder(group[0])
    best: tuple[float, Variant] | None = None
    for variant in ladder[ladder.index(group[0].variant) + 1 :]:
        moved_s = speeds.step_s(state.decoding, variants=_moved(group, variant))
        if moved_s >= _WORTHWHILE * step_s or not _faster(group, variant, moved_s, step_s, speeds):
            continue
        if all(_pace_s(view, variant, moved_s, speeds) <= needed_s(view, state.now_s) for view in group):
            best = moved_s, variant
            break
        if best is None or moved_s < best[0]:
            best = moved_s, variant
    if best is None:
        return []
    return [
        Move(
            key=view.key,
            to=best[1],
            why=_behind(_pace_s(view, view.variant, step_s, speeds), needed_s(view, state.now_s)),
        )
        for view in group
    ]


def _up(group: Sequence[SequenceView], state: StepState, speeds: Speeds) -> list[Move]:
    """To the best variant above with which everything that runs keeps its margin."""
    ladder = _ladder(group[0])
    for variant in ladder[: ladder.index(group[0].variant)]:
        moved = _moved(group, variant)
        moved_s = speeds.step_s(state.decoding, variants=moved)
        paces = [
            (_pace_s(view, moved.get(view.key, view.variant), moved_s, speeds), needed_s(view, state.now_s))
            for view in state.decoding
        ]
        if all(pace_s <= _MARGIN * needed for pace_s, needed in paces):
            return [
                Move(
                    key=view.key,
                    to=variant,
                    why=_ahead(_pace_s(view, variant, moved_s, speeds), needed_s(view, state.now_s)),
                )
                for view in group
            ]
    return []


def _faster(
    group: Sequence[SequenceView], variant: Variant, moved_s: float, step_s: float, speeds: Speeds
) -> bool:
    """Whether tokens come sooner too: a move that ends speculation may shorten steps and not tokens."""
    return all(
        _pace_s(view, variant, moved_s, speeds) < _pace_s(view, view.variant, step_s, speeds)
        for view in group
    )


def _moved(group: Iterable[SequenceView], variant: Variant) -> Mapping[SequenceKey, Variant]:
    return {view.key: variant for view in group}


def _pace_s(view: SequenceView, variant: Variant, step_s: float, speeds: Speeds) -> float:
    """Predicted seconds per token."""
    return step_s / speeds.tokens_per_step(view, variant)


def _behind(pace_s: float, needed: float) -> str:
    if needed <= 0:
        return f"behind: {pace_s * 1e3:.3g} ms a token predicted, and no time is left"
    return f"behind: {pace_s * 1e3:.3g} ms a token predicted, {needed * 1e3:.3g} ms left for each"


def _ahead(pace_s: float, needed: float) -> str:
    left = "and no budget to keep" if math.isinf(needed) else f"{needed * 1e3:.3g} ms left for each"
    return f"ahead: {pace_s * 1e3:.3g} ms a token predicted, {left}"
