"""How the tokens of one choice are drawn: its parameters, made ready once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import torch

from paceline_engine.request import SamplingParams
from paceline_engine.sampling.constraint import Constraint
from paceline_engine.sampling.draw import RandomStream

GREEDY_TEMPERATURE = 1e-5
"""At or below it the most likely token is taken."""
_HUGE = 1e30
"""Bounds what users may multiply and add, so that fp32 logits never become NaN."""


class DrawRule:
    """One choice's sampling parameters, with what they need of its prompt."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        stream: RandomStream,
        prompt_ids: Collection[int] = (),
        end_ids: Collection[int] = (),
        constraint: Constraint | None = None,
    ) -> None:
        self.params = params
        self.stream = stream
        self.greedy = params.temperature <= GREEDY_TEMPERATURE or params.top_p == 0 or params.top_k == 1
        self.constraint = constraint
        self._end_ids = torch.tensor(sorted(end_ids), dtype=torch.long)
        self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.long)
        self._bias = torch.tensor([_bounded(bias) for bias in params.logit_bias.values()])
        self._repetition = max(1 / _HUGE, _bounded(params.repetition_penalty))
        self._presence = _bounded(params.presence_penalty)
        self._frequency = _bounded(params.frequency_penalty)
        self._prompt_ids = frozenset(prompt_ids) if self._repetition != 1 else frozenset[int]()

    def changes_logits(self, n_output: int) -> bool:
        """Whether ``apply`` would change the logits of the token after ``n_output`` others."""
        return (
            self.constraint is not None
            or self._bias_ids.numel() > 0
            or self._repetition != 1
            or self._presence != 0
            or self._frequency != 0
            or self._hides_end(n_output)
        )

    def apply(self, logits: torch.Tensor, output_ids: Sequence[int]) -> None:
        """Penalties, bias, the minimum length and the constraint, in this order and in place.

        Args:
            logits: [vocab], of the token that follows ``output_ids``.
            output_ids: the output so far, drafts before this position included.

        Raises:
            ConstraintFault: the constraint cannot say what may come next.
        """
        device = logits.device
        if self._repetition != 1 and (seen := self._prompt_ids.union(output_ids)):
            # Keskar et al., 2019 (CTRL), with the sign rule that keeps it a penalty for negative logits.
            ids = torch.tensor(list(seen), device=device)
            values = logits[ids]
            logits[ids] = torch.where(values > 0, values / self._repetition, values * self._repetition)
        if output_ids and (self._presence != 0 or self._frequency != 0):
            counts = Counter(output_ids)
            ids = torch.tensor(list(counts), device=device)
            times = torch.tensor(list(counts.values()), dtype=logits.dtype, device=device)
            logits[ids] -= self._presence + self._frequency * times
        if self._bias_ids.numel():
            logits[self._bias_ids.to(device)] += self._bias.to(device)
        logits.clamp_(max=_HUGE)
        if self._hides_end(len(output_ids)):
            logits[self._end_ids.to(device)] = -torch.inf
        if self.constraint is not None:
            self.constraint.mask(logits, output_ids)

    def _hides_end(self, n_output: int) -> bool:
        return n_output < self.params.min_tokens and self._end_ids.numel() > 0


def _bounded(value: float) -> float:
    """As a ``float``: an ``int`` may be too large for torch's 64 bits."""
    return float(min(max(value, -_HUGE), _HUGE))
