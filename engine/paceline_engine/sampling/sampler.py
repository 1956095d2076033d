"""From logits to tokens. Every row is drawn by its own rule; nothing of one row reaches another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline_engine.sampling.constraint import ConstraintFault
from paceline_engine.sampling.device import best_on_device, choose_on_device
from paceline_engine.sampling.rules import DrawRule

_FIRST_LOOK = 1024
"""Tokens that top-p looks at before it sorts the whole vocabulary."""
_FLATTEST = 1e30
"""Temperatures above it draw as it does: minus infinity over one beyond fp32's range would be NaN."""
_MOST_REDRAWS = 16
"""Drawn tokens that a constraint may turn down before it chooses one."""
_SCORE_ROWS = 32
"""Rows whose log-softmax is taken at once: bounds the temporary memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Who draws from one row of logits."""

    at: int
    """Which row of the logits; several choices may draw from one."""
    rule: DrawRule
    output_ids: Sequence[int]
    """The output before this row's token; drafts included where they are verified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A drawn token. Log probabilities are the model's own, before penalties and temperature."""

    token_id: int
    logprob: float | None = None
    """Set where the rule asks for log probabilities."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log probability), most likely first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Undrawable:
    """Why no token could be drawn from a row."""

    reason: str


def draw_tokens(
    logits: torch.Tensor, rows: Sequence[Row], *, with_logprobs: bool = True
) -> list[Drawn | Undrawable]:
    """Draw one token for each of ``rows``.

    Args:
        logits: fp32 [any, vocab]; left unchanged, and not copied for greedy rows.
        rows: which of the logits' rows are drawn from, and how.
        with_logprobs: report log probabilities where a rule asks for them; drafts need none.
    """
    best = _best(logits, sorted({row.at for row in rows}))
    return [_draw_row(logits[row.at], row, *best[row.at], with_logprobs) for row in rows]


def score_tokens(logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int]) -> list[float]:
    """Log probability of given tokens, by a log-softmax in fp32.

    Args:
        logits: fp32 [any, vocab].
        rows: the row of the logits that each token is scored by.
        token_ids: one for each of ``rows``.
    """
    unique = sorted(set(rows))
    if not unique:
        return []
    parts = (unique[start : start + _SCORE_ROWS] for start in range(0, len(unique), _SCORE_ROWS))
    log_totals = torch.cat([torch.logsumexp(logits[part], dim=-1) for part in parts])
    places = {row: place for place, row in enumerate(unique)}
    chosen = logits[list(rows), list(token_ids)] - log_totals[[places[row] for row in rows]]
    scores: list[float] = chosen.tolist()
    return scores


def _draw_row(
    logits: torch.Tensor, row: Row, best_id: int, best: float, with_logprobs: bool
) -> Drawn | Undrawable:
    # logits: [vocab]
    if not math.isfinite(best):
        return Undrawable(reason=f"the model's largest logit is {best}")
    rule, position = row.rule, len(row.output_ids)
    n_top = rule.params.logprobs if with_logprobs else None
    if not rule.changes_logits(position):
        token_id = best_id if rule.greedy else _draw_by_chance(logits, rule, position, best)
        return _with_logprobs(logits, token_id, n_top)
    changed = logits.clone()
    try:
        rule.apply(changed, row.output_ids)
        drawn = _draw_admitted(changed, rule, row.output_ids)
    except ConstraintFault as error:
        return Undrawable(reason=str(error))
    if drawn is None:
        return Undrawable(reason="penalties, bias, min_tokens and masks leave no token to draw")
    return _with_logprobs(logits, drawn, n_top)


def _draw_admitted(logits: torch.Tensor, rule: DrawRule, output_ids: Sequence[int]) -> int | None:
    """A token that the rule's constraint admits; those that it does not are masked in ``logits`` [vocab].

    The number drawn for the position is the same each time, so the token depends on the output alone.
    """
    constraint = rule.constraint
    for _ in range(_MOST_REDRAWS):
        token_id, best = _best(logits[None], [0])[0]
        if not math.isfinite(best):
            break
        if not rule.greedy:
            token_id = _draw_by_chance(logits, rule, len(output_ids), best)
        if constraint is None or constraint.admits(output_ids, token_id):
            return token_id
        logits[token_id] = -torch.inf
    return None if constraint is None else constraint.way_out(output_ids)


def _best(logits: torch.Tensor, rows: Sequence[int]) -> dict[int, tuple[int, float]]:
    """Index and value of the maximum of each of ``rows``; NaN is the largest of all."""
    if logits.device.type == "cpu":
        # NumPy's argmax is vectorized, torch's is not: 0.02 against 0.25 ms for 262,144 entries.
        array = logits.detach().numpy()
        return {at: (best := int(array[at].argmax()), float(array[at, best])) for at in rows}
    return best_on_device(logits, rows)


def _draw_by_chance(logits: torch.Tensor, rule: DrawRule, position: int, best: float) -> int:
    """Temperature, then top-k, top-p (Holtzman et al., 2020) and min-p (Nguyen et al., 2024), then draw."""
    params = rule.params
    scaled = (logits - best) / float(min(params.temperature, _FLATTEST))  # [vocab], largest is 0
    if not logits.is_cpu:
        return choose_on_device(scaled, params, rule.stream.uniform(position))
    weights, ids = _kept(scaled, top_k=params.top_k, top_p=params.top_p)
    if params.min_p > 0:
        weights = weights.where(weights >= params.min_p, 0.0)  # the largest weight is exp(0) = 1
    cumulative = weights.cumsum(0)
    target = cumulative[-1] * rule.stream.uniform(position)
    # right=True gives the first entry above the target, so an entry of weight 0 is never drawn.
    place = int(torch.searchsorted(cumulative, target, right=True))
    if place >= len(weights):  # rounding put the target on the total
        place = int(weights.nonzero()[-1])
    return place if ids is None else int(ids[place])


def _kept(scaled: torch.Tensor, *, top_k: int, top_p: float) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Unnormalized fp64 probabilities of the tokens that top-k and top-p keep, and their ids (None: all)."""
    n_vocab = scaled.shape[0]
    by_rank = 0 < top_k < n_vocab
    if not by_rank and top_p >= 1:
        return scaled.exp().double(), None
    values, ids = scaled.topk(top_k if by_rank else min(_FIRST_LOOK, n_vocab))
    weights = values.double().exp()
    if top_p >= 1:
        return weights, ids
    total = weights.sum() if by_rank else scaled.exp().sum(dtype=torch.float64)
    if not by_rank and weights.sum() < top_p * total:
        values, ids = scaled.sort(descending=True)
        weights = values.double().exp()
    before = weights.cumsum(0) - weights
    n_kept = max(1, int((before < top_p * total).sum()))
    return weights[:n_kept], ids[:n_kept]


def _with_logprobs(logits: torch.Tensor, token_id: int, n_top: int | None) -> Drawn:
    if n_top is None:
        return Drawn(token_id=token_id)
    log_total = torch.logsumexp(logits, dim=0)
    logprob = float(logits[token_id] - log_total)
    values, ids = logits.topk(min(n_top, logits.shape[0]))
    top = tuple(zip(ids.tolist(), (values - log_total).tolist(), strict=True))
    return Drawn(token_id=token_id, logprob=logprob, top=top)
