"""Drawing where the logits lie on a GPU: they stay there, and one copy brings back what was chosen.

The same draws as in ``sampler``, in a form that never asks the device in between.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline_engine.request import SamplingParams


def best_on_device(logits: Tensor, rows: Sequence[int]) -> dict[int, tuple[int, float]]:
    """Index and value of the maximum of each of ``rows``; NaN is the largest of all."""
    part = logits if len(rows) == logits.shape[0] else logits[list(rows)]
    values, indices = part.max(dim=-1)
    # fp64 holds every fp32 value and every index exactly.
    found: list[list[float]] = torch.stack([indices.double(), values.double()], dim=-1).tolist()
    return {row: (int(index), value) for row, (index, value) in zip(rows, found, strict=True)}


def choose_on_device(scaled: Tensor, params: SamplingParams, uniform: float) -> int:
    """A token by chance.

    Args:
        scaled: fp32 [vocab], logits over the temperature, the largest 0.
        uniform: the number in [0, 1) that decides.
    """
    n_vocab = scaled.shape[0]
    by_rank = 0 < params.top_k < n_vocab
    ids: Tensor | None = None
    if by_rank:
        scaled, ids = scaled.topk(params.top_k)
    elif params.top_p < 1:
        scaled, ids = scaled.sort(descending=True)
    weights = scaled.double().exp()
    if params.top_p < 1:
        before = weights.cumsum(0) - weights
        kept = before < params.top_p * weights.sum()
        kept[0] = True
        weights = weights.where(kept, 0.0)
    if params.min_p > 0:
        weights = weights.where(weights >= params.min_p, 0.0)  # the largest weight is exp(0) = 1
    cumulative = weights.cumsum(0)
    place = torch.searchsorted(cumulative, (cumulative[-1] * uniform)[None], right=True)[0]
    # Rounding may put the target on the total: then the last token that has a weight.
    numbers = torch.arange(len(weights), device=weights.device)
    place = torch.minimum(place, numbers.where(weights > 0, 0).amax())
    return int(place if ids is None else ids.gather(0, place[None]))
