"""Drafting with the same model at a lower precision, one token of every stream a pass.

The passes write the drafts' KV where the target's own will stand: verifying overwrites it (the variants share
one cache; the idea is Self-Speculative Decoding's, Zhang et al., 2023, with rounding in place of skipped
layers). Their output matrix is cut down to likely tokens, as in FR-Spec (Zhao et al., 2025): what is missing
there is only never proposed. A draft is drawn as the target will draw, by the same rule and random number,
so that the two agree as far as their logits do, also when sampling.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from paceline_engine.mode import Drafter as DrafterKind
from paceline_engine.mode import Variant
from paceline_engine.model.base import Logits, ModelRunner, SequenceSlice, Vocabulary
from paceline_engine.sampling.sampler import Row, Undrawable, draw_tokens
from paceline_engine.speculate.base import DraftRequest
from paceline_engine.speculate.proposal import Evidence
from paceline_engine.timeline import StepTime

_CONFIDENCES = (0.3, 0.5, 0.7, 0.85, 0.95, 0.99)
"""Bounds of the levels of evidence: the drafter's probability of the token that it drew."""


@dataclass(slots=True, kw_only=True)
class Chain:
    """One stream's drafts as they grow."""

    request: DraftRequest
    token_ids: list[int] = field(default_factory=list[int])
    evidence: list[Evidence] = field(default_factory=list[Evidence])
    reached: float = 1.0
    """The probability that all of its drafts are accepted."""
    ended: bool = False

    @property
    def room(self) -> int:
        return 0 if self.ended else self.request.most - len(self.token_ids)

    def drop_last(self) -> None:
        """End without the last draft, which is not worth verifying."""
        self.token_ids.pop()
        self.evidence.pop()
        self.ended = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPass:
    """A pass that proposed one token for each chain."""

    step: StepTime
    chains: tuple[Chain, ...]


class SelfDrafter:
    """Lengthens chains of drafts, one token of each a pass."""

    def __init__(self, runner: ModelRunner, common_ids: Sequence[int], clock: Callable[[], float]) -> None:
        self._runner = runner
        self._common_ids = tuple(common_ids)
        self._is_common = frozenset(common_ids)
        self._clock = clock

    def extend(self, chains: Sequence[Chain], variant: Variant) -> DraftPass:
        """One pass of ``variant``; a chain whose rule leaves nothing to draw stays as it is."""
        started_at_s = self._clock()
        for chain in chains:
            chain.request.stream.follow(chain.request.token_ids)
        slices = [_slice(chain) for chain in chains]
        logits = self._runner.forward(slices, variant, vocabulary=self._vocabulary(chains))  # [chains, vocab]
        rows = [
            Row(
                at=at,
                rule=chain.request.rule,
                output_ids=[*chain.request.output_ids, *chain.token_ids],
            )
            for at, chain in enumerate(chains)
        ]
        drawn = draw_tokens(logits, rows, with_logprobs=False)
        totals = torch.logsumexp(logits, dim=-1).tolist()
        for at, (chain, token) in enumerate(zip(chains, drawn, strict=True)):
            if isinstance(token, Undrawable):
                chain.ended = True
            else:
                confidence = float(torch.exp(logits[at, token.token_id] - totals[at]))
                chain.token_ids.append(token.token_id)
                chain.evidence.append(evidence_of(confidence))
        step = StepTime(
            started_at_s=started_at_s,
            ended_at_s=self._clock(),
            variant=variant,
            prefill_tokens=0,
            decode_tokens=len(chains),
            n_sequences=len(chains),
            context_tokens=sum(item.position + 1 for item in slices),
            attended_pairs=sum(item.position + 1 for item in slices),
            drafting=True,
        )
        return DraftPass(step=step, chains=tuple(chains))

    def _vocabulary(self, chains: Sequence[Chain]) -> Vocabulary | None:
        if len(self._common_ids) >= self._runner.spec.vocab_size:
            return None
        likely = set[int]().union(*(chain.request.stream.likely_ids for chain in chains))
        return Vocabulary(common_ids=self._common_ids, extra_ids=tuple(likely - self._is_common))


def _slice(chain: Chain) -> SequenceSlice:
    known = chain.request.token_ids
    return SequenceSlice(
        token_ids=(chain.token_ids[-1] if chain.token_ids else known[-1],),
        position=len(known) - 1 + len(chain.token_ids),
        block_table=chain.request.block_table,
        logits=Logits.LAST,
        adapter=chain.request.adapter,
    )


def evidence_of(confidence: float) -> Evidence:
    return Evidence(drafter=DrafterKind.SELF, level=bisect.bisect(_CONFIDENCES, confidence))
