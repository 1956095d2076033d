"""What a step would cost now: the numbers handed over, corrected by the passes just run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from paceline_engine.mode import Mode, Variant
from paceline_engine.schedule.base import SequenceKey, SequenceView
from paceline_engine.timeline import StepTime
from paceline_policies.drafting import TypicalDrafting
from paceline_policies.drift import Drift
from paceline_policies.pacing.numbers import StepNumbers, VariantNumbers

_OLD_STEPS = 32


@dataclass(slots=True)
class _Load:
    """One pass: sums over its sequences."""

    prefill: int = 0
    decode: float = 0.0
    context: float = 0.0
    pairs: float = 0.0


class Speeds:
    """Predicts steps and learns from each; a variant that was never measured costs as the slowest known."""

    def __init__(self, numbers: StepNumbers) -> None:
        self._numbers = numbers
        self._drafting = TypicalDrafting(rates=numbers.acceptance, shares=numbers.proposed)
        self._drifts: dict[tuple[Variant, str], Drift] = {}
        self._seen_at: dict[tuple[Variant, str], int] = {}
        """The step at which each was last observed."""
        self._n_steps = 0

    @property
    def known(self) -> bool:
        """Whether anything is known of this machine."""
        return bool(self._numbers.variants)

    def observe(self, steps: Iterable[StepTime]) -> None:
        """Take up how long passes took: three in a row that are slower count, one does not."""
        self._n_steps += 1
        for step in steps:
            kind = _kind(step.prefill_tokens, drafting=step.drafting)
            numbers = (self._numbers.drafts if step.drafting else self._numbers.variants).get(step.variant)
            if numbers is None:
                continue
            predicted = numbers.pass_s(
                prefill=step.prefill_tokens,
                decode=step.decode_tokens,
                context=step.context_tokens,
                pairs=step.attended_pairs,
            )
            if predicted > 0:
                drift = self._drifts.setdefault((step.variant, kind), Drift())
                drift.observe((step.ended_at_s - step.started_at_s) / predicted)
                self._seen_at[step.variant, kind] = self._n_steps

    def tokens_per_step(self, view: SequenceView, variant: Variant) -> float:
        """Expected tokens that one step gives to the stream, if it runs as ``variant``."""
        return self._drafting.tokens_per_pass(_mode_as(view.plan.mode, variant))

    def step_s(
        self,
        decoding: Iterable[SequenceView],
        *,
        variants: Mapping[SequenceKey, Variant] | None = None,
        prefills: Iterable[tuple[SequenceView, int]] = (),
    ) -> float:
        """Predicted seconds of a step: its passes, one for each variant, and the drafts before them.

        Args:
            decoding: the streams that get a token.
            variants: those that would run as another variant than they do.
            prefills: prompts with the number of their tokens to run.
        """
        moved = {} if variants is None else variants
        passes: dict[Variant, _Load] = {}
        drafts: dict[Variant, list[tuple[float, int]]] = {}
        for view in decoding:
            variant = moved.get(view.key, view.variant)
            context = view.computed_tokens + 1
            mode = _mode_as(view.plan.mode, variant)
            speculation, n_drafts = mode.speculation, self._drafting.drafts_per_pass(mode)
            load = passes.setdefault(variant, _Load())
            load.decode += 1 + n_drafts
            load.context += context
            load.pairs += context * (1 + n_drafts)
            if speculation is not None and speculation.draft_variant is not None:
                drafts.setdefault(speculation.draft_variant, []).append((n_drafts, context))
        for view, n_tokens in prefills:
            load = passes.setdefault(view.variant, _Load())
            load.prefill += n_tokens
            load.context += view.computed_tokens + n_tokens
            load.pairs += n_tokens * view.computed_tokens + n_tokens * (n_tokens + 1) / 2
        seconds = sum(self._pass_s(variant, load) for variant, load in passes.items())
        seconds += sum(self._drafts_s(variant, found) for variant, found in drafts.items())
        return seconds + self._numbers.gap_s

    def prefill_s(self, view: SequenceView, *, chunk_tokens: int) -> float:
        """Predicted seconds of the rest of a prompt, run alone in chunks."""
        rest = view.remaining_tokens
        chunk = min(rest, chunk_tokens)
        if chunk < 1:
            return 0.0
        pairs = chunk * (view.computed_tokens + rest / 2)
        load = _Load(prefill=chunk, context=view.computed_tokens + rest, pairs=pairs)
        return (self._pass_s(view.variant, load) + self._numbers.gap_s) * rest / chunk

    def _pass_s(self, variant: Variant, load: _Load) -> float:
        found = self._numbers.variants.get(variant)
        candidates = (found,) if found is not None else tuple(self._numbers.variants.values())
        seconds = max((_cost(each, load) for each in candidates), default=0.0)
        return seconds * self._scale(variant, _kind(load.prefill, drafting=False))

    def _drafts_s(self, variant: Variant, streams: list[tuple[float, int]]) -> float:
        """The draft passes that streams share: as many as the longest draft has tokens."""
        load = _Load(decode=len(streams), context=sum(context for _, context in streams))
        load.pairs = load.context
        numbers = self._numbers.drafts.get(variant)
        # A full pass of the variant is an upper bound: drafting leaves out most of the output matrix.
        one = self._pass_s(variant, load) if numbers is None else _cost(numbers, load)
        if numbers is not None:
            one *= self._scale(variant, _kind(0, drafting=True))
        return one * max(n_drafts for n_drafts, _ in streams)

    def _scale(self, variant: Variant, kind: str) -> float:
        """How much slower than their numbers such passes run.

        Beside a long prompt every pass prefills, so what is known of passes that only decode grows old:
        then the variant's other passes tell more of the machine's speed.
        """
        seen = {each: at for each, at in self._seen_at.items() if each[0] is variant}
        if not seen:
            return 1.0
        own = (variant, kind)
        if self._n_steps - seen.get(own, -_OLD_STEPS) < _OLD_STEPS:
            return self._drifts[own].scale
        return self._drifts[max(seen, key=seen.__getitem__)].scale


def _cost(numbers: VariantNumbers, load: _Load) -> float:
    return numbers.pass_s(prefill=load.prefill, decode=load.decode, context=load.context, pairs=load.pairs)


def _kind(prefill_tokens: int, *, drafting: bool) -> str:
    return "draft" if drafting else "prefill" if prefill_tokens else "decode"


def _mode_as(mode: Mode, variant: Variant) -> Mode:
    """The mode with another variant; one that would draft for itself does not draft."""
    if variant is mode.variant:
        return mode
    speculation = mode.speculation
    if speculation is not None and speculation.draft_variant is variant:
        speculation = None
    return replace(mode, variant=variant, speculation=speculation)
