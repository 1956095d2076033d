"""Chooses for every stream and step who drafts, and how much."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline_engine.mode import Drafter as DrafterKind
from paceline_engine.mode import Variant
from paceline_engine.model.base import ModelRunner
from paceline_engine.speculate.acceptance import Acceptance
from paceline_engine.speculate.base import DraftRequest
from paceline_engine.speculate.costs import PassCosts, PassKind
from paceline_engine.speculate.length import Outlook
from paceline_engine.speculate.ngram import NgramDrafter
from paceline_engine.speculate.proposal import ANY, Evidence, Proposal
from paceline_engine.speculate.self_draft import Chain, DraftPass, SelfDrafter
from paceline_engine.speculate.sessions import SessionKey, SessionTexts
from paceline_engine.speculate.stream import DraftStream
from paceline_engine.timeline import StepTime

_LOG = logging.getLogger(__name__)
_LONG_MATCH = 4
"""Level of an n-gram match of 8 tokens or more: trusted where nothing is to be measured."""
_PRIOR_WEIGHT = 12.0
_MEMORY_STEPS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What the step runs without drafts, per variant."""

    variant: Variant
    n_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """What the drafters gave for one step."""

    proposals: Sequence[Proposal]
    """One a request, in their order."""
    passes: Sequence[DraftPass] = ()
    failures: Sequence[tuple[DraftRequest, Exception]] = field(default=())
    """Streams that draft with a model no more, since its pass failed."""


class Speculator:
    """Drafts for the streams of a step, and learns from what became of the drafts.

    Args:
        ready: whether a variant is in memory; until it is, nothing is drafted with it.
        adapt: draft as much as pays; else always as much as is allowed, with the n-gram drafter where its
            match is long (to measure acceptance, and in tests).
    """

    def __init__(
        self,
        runner: ModelRunner,
        common_ids: Sequence[int],
        *,
        clock: Callable[[], float],
        ready: Callable[[Variant], bool] = lambda _: True,
        adapt: bool = True,
    ) -> None:
        self._ngram = NgramDrafter()
        self._self = SelfDrafter(runner, common_ids, clock)
        self._known = Acceptance(_first_guess, prior_weight=_PRIOR_WEIGHT, memory=_MEMORY_STEPS)
        self._costs = PassCosts()
        self._ready = ready
        self.sessions = SessionTexts(clock)
        self._adapt = adapt

    def new_stream(self, session: SessionKey | None = None) -> DraftStream:
        """What is known of a stream that begins, with what was said in its session."""
        return DraftStream(self._known, earlier=() if session is None else self.sessions.earlier(session))

    def observe(self, step: StepTime) -> None:
        """Learn what a pass cost."""
        self._costs.observe(step)

    def learn(self, stream: DraftStream, proposal: Proposal, n_accepted: int) -> None:
        """Learn how many of a proposal's tokens the target drew as well."""
        stream.learn(proposal, n_accepted, self._known)

    def draft(self, requests: Sequence[DraftRequest], planned: Sequence[Planned], n_decoding: int) -> Drafts:
        """Propose tokens for every request, running draft passes where these pay."""
        outlook = self._outlook(requests[0].target, planned, n_decoding)
        proposals = self._ngram.propose(requests)
        chains: dict[int, Chain] = {}
        for place, request in enumerate(requests):
            request.stream.acceptance.fade()
            proposals[place], with_model = self._choose(request, proposals[place], outlook)
            if with_model:
                chains[place] = Chain(request=request)
        self._known.fade()
        passes, failures = self._run_chains(list(chains.values()), outlook)
        for place, chain in chains.items():
            proposals[place] = Proposal(token_ids=tuple(chain.token_ids), evidence=tuple(chain.evidence))
        return Drafts(proposals=proposals, passes=passes, failures=failures)

    def _outlook(self, target: Variant, planned: Sequence[Planned], n_decoding: int) -> Outlook:
        seconds = sum(
            self._costs.predict(PassKind(variant=part.variant), part.n_tokens, target=target)
            for part in planned
        )
        known = all(self._costs.knows(part.variant) for part in planned)
        return Outlook(tokens=n_decoding, seconds=seconds, plain_s=seconds if known else math.inf)

    def _choose(self, request: DraftRequest, ngram: Proposal, outlook: Outlook) -> tuple[Proposal, bool]:
        """The n-gram proposal, as far as it pays, and whether to draft with the model instead."""
        speculation = request.speculation
        can_self = (
            speculation.draft_variant is not None
            and speculation.draft_variant != request.target
            and request.stream.self_drafts
            and self._ready(speculation.draft_variant)
        )
        if not self._adapt:
            trusted = bool(ngram.evidence) and ngram.evidence[0].level >= _LONG_MATCH
            return ngram, can_self and not trusted
        estimate = request.stream.acceptance.estimate
        verify_s = self._verify_s(request.target)
        limit_s = outlook.limit_s(request.others)
        best, count = outlook.after(map(estimate, ngram.evidence), verify_s, limit_s=limit_s)
        cut = Proposal(token_ids=ngram.token_ids[:count], evidence=ngram.evidence[:count])
        if can_self:
            with_self, n_self = outlook.after(
                [estimate(ANY)] * request.most, verify_s + self._draft_s(request, 1), limit_s=limit_s
            )
            if n_self > 0 and with_self.rate > best.rate:
                return cut, True
        outlook.tokens, outlook.seconds = best.tokens, best.seconds
        return cut, False

    def _run_chains(
        self, chains: Sequence[Chain], outlook: Outlook
    ) -> tuple[list[DraftPass], list[tuple[DraftRequest, Exception]]]:
        passes: list[DraftPass] = []
        failures: list[tuple[DraftRequest, Exception]] = []
        by_variant: dict[Variant, list[Chain]] = {}
        for chain in chains:
            variant = chain.request.speculation.draft_variant
            assert variant is not None
            by_variant.setdefault(variant, []).append(chain)
        for variant, group in by_variant.items():
            while active := self._active(group, outlook):
                try:
                    done = self._self.extend(active, variant)
                except Exception as error:
                    _LOG.exception("a draft pass of %s failed: its streams go on without", variant)
                    for chain in active:
                        chain.request.stream.self_drafts = False
                        failures.append((chain.request, error))
                    break
                passes.append(done)
                self._costs.observe(done.step)
                self._take_stock(active, outlook)
        return passes, failures

    def _active(self, group: Sequence[Chain], outlook: Outlook) -> list[Chain]:
        """The chains that are to grow by another draft: none where a further pass does not pay."""
        active = [chain for chain in group if chain.room > 0 and chain.request.wanted()]
        if not self._adapt or not active:
            return active
        verify_s = self._verify_s(active[0].request.target)
        gains = {id(chain): chain.reached * chain.request.stream.acceptance.estimate(ANY) for chain in active}
        soonest_s = outlook.seconds + self._draft_s(active[0].request, len(active)) + verify_s * len(active)
        active = [
            chain
            for chain in active
            if outlook.pays(gains[id(chain)], verify_s) and soonest_s <= outlook.limit_s(chain.request.others)
        ]
        if not active:
            return []
        seconds = self._draft_s(active[0].request, len(active)) + len(active) * verify_s
        return active if outlook.pays(sum(gains[id(chain)] for chain in active), seconds) else []

    def _take_stock(self, active: Sequence[Chain], outlook: Outlook) -> None:
        """The drafts are drawn: put what speaks for them in the outlook, and end chains that do not pay."""
        outlook.seconds += self._draft_s(active[0].request, len(active))
        for chain in active:
            if chain.ended:
                continue
            chain.reached *= chain.request.stream.acceptance.estimate(chain.evidence[-1])
            verify_s = self._verify_s(chain.request.target)
            if not self._adapt or outlook.pays(chain.reached, verify_s):
                outlook.add(chain.reached, verify_s)
            else:
                chain.drop_last()

    def _draft_s(self, request: DraftRequest, n_tokens: int) -> float:
        variant = request.speculation.draft_variant
        assert variant is not None
        kind = PassKind(variant=variant, drafting=True)
        return self._costs.predict(kind, n_tokens, target=request.target)

    def _verify_s(self, target: Variant) -> float:
        """What one more token adds to the target's pass."""
        kind = PassKind(variant=target)
        return self._costs.predict(kind, 2, target=target) - self._costs.predict(kind, 1, target=target)


def _first_guess(evidence: Evidence) -> float:
    """Acceptance before anything is known. Measured drafts soon outweigh it."""
    if evidence == ANY:
        return 0.8
    if evidence.drafter is DrafterKind.SELF:
        return (0.35, 0.55, 0.7, 0.8, 0.9, 0.96, 0.99)[evidence.level]
    guess = min(0.95, 0.2 + 0.14 * evidence.level)
    return 0.6 * guess if evidence.earlier else guess
