"""What one mode would take in one snapshot: a step model, scales that follow the machine, conformal errors.

    TTFT = overhead + queue + prefill
        overhead   from submission to the first step, measured on an idle engine
        queue      half a step that is under way, and the prefill of the prompts before ours
        prefill    our prompt without its cached prefix, in chunks, beside the decoding sequences
    TPOT = (decode pass with all that shares it + drafts + gap) / expected tokens per pass
    E2E  = TTFT + TPOT · (max_tokens - 1)

Each is multiplied by quantiles of recent ratios measured / predicted (see ``conformal``): the median
gives p50 and the conformal 0.9 quantile gives p90. Where drafts are made, the tokens of a pass are not one
number but those of recent answers to like prompts (see ``drafting``), each with the ratio it had. A LoRA
adapter has scales of its own on top of its variant's, which begin at 1.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Literal, NamedTuple

import numpy as np

from paceline_engine.mode import Mode, Variant
from paceline_engine.snapshot import Snapshot
from paceline_engine.timeline import StepTime, Timeline
from paceline_policies.conformal import Errors, FloatArray, Sample, assumed_samples, log_spread, quantile
from paceline_policies.decision import Prediction
from paceline_policies.drafting import Drafted, Drafting, Rate, acceptance_of, expected_tokens
from paceline_policies.drift import Drift, Pause
from paceline_policies.forecast import Budgets, Forecast, Work
from paceline_policies.profile import Profile, VariantProfile
from paceline_policies.step_model import StepLoad, StepModel, fit, phase_steps
from paceline_policies.workload import Beside, decode_load, option_load, prefill_load

WINDOW = 96
"""Samples kept for each variant."""
_ENOUGH = 20
"""With fewer samples of its own, a window is filled up."""
_POOL_BELOW = 9
"""With fewer (the least for which a 0.9 quantile exists), other variants' samples are used too."""
_CALIBRATED_SPREAD = 0.1
_ASSUMED_SPREAD = 0.7
"""Log deviation of the samples that fill up: a calibrated model errs by tenths, a guess by factors."""
_DRAFTS_TO_FIT = 16
_REFIT_AT = (3, 6, 12, 24, 48, 96)
_WIDEST_RATIO = 50.0
_TTFT_RANKS = (0.05, 0.3, 0.5, 0.7, 0.9)

ASSUMED_STEP = StepModel(fixed_s=0.02, chunk_s=0.2, small_s=1e-3, large_s=1e-3, decode_s=0.02)
"""The guess for a variant that was never measured."""


Phase = Literal["prefill", "decode", "verify", "draft"]


class _Measured(NamedTuple):
    ttft_ms: float
    tpot_ms: float | None
    e2e_ms: float


class _Passes(NamedTuple):
    """Seconds from one pass of ours to the next."""

    plain_s: float
    """Without drafts."""
    longest_s: float
    """With the longest draft."""

    def tpot_s(self, share: Rate, tokens: Rate) -> Rate:
        """Of passes that verify so much of the longest draft and bring so many tokens."""
        return (self.plain_s + (self.longest_s - self.plain_s) * share) / tokens


class _State:
    """What is known of one variant."""

    __slots__ = (
        "assumed",
        "draft",
        "draft_seen",
        "drifts",
        "n_seen",
        "samples",
        "seen",
        "step",
    )

    def __init__(self, profile: VariantProfile) -> None:
        self.step = profile.step
        self.drifts: dict[Phase, Drift] = {
            "prefill": Drift(profile.prefill_scale),
            "decode": Drift(profile.decode_scale),
            "verify": Drift(profile.verify_scale),
            "draft": Drift(profile.draft_scale),
        }
        self.samples: deque[Sample] = deque(profile.samples, maxlen=WINDOW)
        self.assumed = profile.assumed
        self.seen: deque[tuple[Mode, Snapshot, Timeline]] = deque(maxlen=WINDOW)
        """Kept only while the step model is a guess, to fit one."""
        self.n_seen = 0
        self.draft = profile.draft
        self.draft_seen: list[StepTime] = []
        """Kept only while what a drafting pass costs is unknown."""


class Predictor:
    """Predicts one backend's durations and learns from every timeline. Not safe for threads."""

    def __init__(self, profile: Profile, *, chunk_tokens: int = 512) -> None:
        """``chunk_tokens`` is the most prompt tokens that one step of the backend prefills."""
        self._base = profile
        self._chunk_tokens = chunk_tokens
        self._states = {variant: _State(each) for variant, each in profile.variants.items()}
        self._drafting = Drafting(profile.drafted)
        self._adapters: dict[tuple[str, Variant, Phase], Drift] = {}
        """How much slower a phase is with an adapter; not kept in the profile, which is the model's own."""
        self._overhead = Pause(profile.overhead_s)
        self._gap = Pause(profile.gap_s)
        self._errors: dict[tuple[object, ...], Errors] = {}
        """By the windows of samples they are made of, and by what fills those up."""

    def knows(self, variant: Variant) -> bool:
        """Whether the variant was measured, by calibration or by traffic."""
        state = self._states.get(variant)
        return state is not None and not (state.assumed and not state.samples)

    def quality(self, variant: Variant) -> float | None:
        """What was shown of its quality, or None where it was not measured."""
        found = self._base.qualities.get(variant)
        return None if found is None else found.shown

    @property
    def profile(self) -> Profile:
        """All that was learned, ready to be saved."""
        variants = {
            variant: VariantProfile(
                step=state.step,
                prefill_scale=state.drifts["prefill"].scale,
                decode_scale=state.drifts["decode"].scale,
                verify_scale=state.drifts["verify"].scale,
                samples=tuple(state.samples),
                assumed=state.assumed,
                draft=state.draft,
                draft_scale=state.drifts["draft"].scale,
            )
            for variant, state in self._states.items()
        }
        return replace(
            self._base,
            variants=variants,
            overhead_s=self._overhead.seconds,
            gap_s=self._gap.seconds,
            drafted=self._drafting.known,
        )

    def predict(
        self,
        mode: Mode,
        snapshot: Snapshot,
        *,
        max_tokens: int,
        kind: str = "chat",
        option_tokens: Sequence[int] = (),
    ) -> Prediction:
        """p50 and p90 of TTFT, TPOT and E2E if it ran to the cap."""
        work = Work(max_tokens=max_tokens, kind=kind, option_tokens=tuple(option_tokens))
        return self.forecast(mode, snapshot, work).prediction

    def p_meet(self, mode: Mode, snapshot: Snapshot, budgets: Budgets, *, max_tokens: int) -> float:
        """Probability that every budget is met at once."""
        return self.forecast(mode, snapshot, Work(max_tokens=max_tokens)).p_meet(budgets)

    def forecast(self, mode: Mode, snapshot: Snapshot, work: Work) -> Forecast:
        """The durations of the work, with the errors that such predictions had of late."""
        ttft = self._ttft_s(mode, snapshot, work) * 1e3
        plain = self._errors_of(mode.variant)
        if work.kind == "choose" or work.max_tokens <= 1:
            return Forecast(ttft_ms=ttft, tpot_ms=None, e2e_ms=ttft, errors=plain, kind=work.kind)
        passes = self._passes(mode, snapshot, work)
        after = work.max_tokens - 1
        if mode.speculation is None:
            each = passes.plain_s * 1e3
            return Forecast(
                ttft_ms=ttft, tpot_ms=each, e2e_ms=ttft + each * after, errors=plain, kind=work.kind
            )
        found = self._drafting.outcomes(mode, snapshot.repetition)
        share = found.drafts_per_pass / mode.speculation.max_draft_tokens
        tpot = passes.tpot_s(share, found.tokens_per_pass) * 1e3
        tpot[: len(found.ratios)] *= found.ratios
        first = ttft * _spread_ttft(plain, tpot, found.weights)
        durations = np.column_stack([first, tpot, first + tpot * after])
        tpot_ms, e2e_ms = (quantile(durations[:, column], found.weights, 0.5) for column in (1, 2))
        errors = Errors(durations / (ttft, tpot_ms, e2e_ms), found.weights, first=plain)
        return Forecast(ttft_ms=ttft, tpot_ms=tpot_ms, e2e_ms=e2e_ms, errors=errors, kind=work.kind)

    def observe(
        self, mode: Mode, snapshot: Snapshot, prediction: Prediction | None, timeline: Timeline
    ) -> None:
        """Learn from a generation that ran in ``mode`` after ``snapshot``.

        The errors are taken against a prediction for the tokens that were produced, not for the cap,
        so a generation that ended early, was cancelled or failed tells as much as it can: one without
        a first token only tells of its steps. ``prediction`` (for the cap) is not needed for that.
        """
        if timeline.queued_at_s is not None:
            # The first use of a grammar says nothing of the mode: learn from after it.
            timeline = replace(timeline, submitted_at_s=timeline.queued_at_s, queued_at_s=None)
        state = self._state(mode.variant)
        measured = _measured(mode, timeline)
        # What waited for its weights happens once a start, and says nothing of the turns to come.
        loaded_first = mode.variant in snapshot.loading_s
        if measured is not None and mode.speculation is not None:
            self._observe_drafted(mode, snapshot, timeline, measured)
        elif measured is not None and not loaded_first:
            forecast = self.forecast(mode, snapshot, Work(max_tokens=timeline.n_tokens))
            state.samples.append(_ratios(measured, forecast))
            if state.assumed:
                state.seen.append((mode, snapshot, timeline))
                state.n_seen += 1
        if timeline.steps:
            self._observe_steps(timeline.steps, snapshot.adapter)
            if snapshot.running == snapshot.waiting == 0 and not loaded_first:
                self._observe_pauses(timeline)
        elif measured is not None:
            self._observe_phases(mode.variant, timeline, snapshot.adapter)
        if state.assumed and state.n_seen in _REFIT_AT and measured is not None:
            self._refit(state)
        self._forget_errors(state.samples)

    def _state(self, variant: Variant) -> _State:
        if variant not in self._states:
            self._states[variant] = _State(VariantProfile(step=ASSUMED_STEP, assumed=True))
        return self._states[variant]

    def _scale(self, variant: Variant, phase: Phase, adapter: str | None = None) -> float:
        """What the fit's seconds are multiplied by."""
        scale = self._state(variant).drifts[phase].scale
        slower = None if adapter is None else self._adapters.get((adapter, variant, phase))
        return scale if slower is None else scale * slower.scale

    def _follow(self, variant: Variant, phase: Phase, adapter: str | None, ratio: float) -> None:
        """Take in a ratio measured / fitted: of the variant, or of the adapter that ran over it."""
        drift = self._state(variant).drifts[phase]
        if adapter is not None:
            ratio /= drift.scale
            drift = self._adapters.setdefault((adapter, variant, phase), Drift())
        drift.observe(ratio)

    def _ttft_s(self, mode: Mode, snapshot: Snapshot, work: Work) -> float:
        state = self._state(mode.variant)
        beside, other_s = self._beside(mode, snapshot, waiting=0)
        cached = min(max(0, self._cached(mode, snapshot)), max(0, snapshot.prompt_tokens - 1))
        own = max(1, snapshot.prompt_tokens - cached)
        ours = prefill_load(own, start=cached, chunk_tokens=self._chunk_tokens, beside=beside)
        seconds = state.step.seconds(ours)
        passes = ours.passes
        if branches := sum(max(0, tokens - 1) for tokens in work.option_tokens):
            options = option_load(
                branches,
                context_tokens=snapshot.prompt_tokens,
                chunk_tokens=self._chunk_tokens,
                beside=beside,
            )
            seconds += state.step.seconds(options)
            passes += options.passes
        if snapshot.waiting_prefill_tokens > 0:
            queued = self._queue_load(snapshot, beside)
            seconds += state.step.seconds(queued)
            passes += queued.passes
        seconds *= self._scale(mode.variant, "prefill", snapshot.adapter)
        if snapshot.running:
            # An arrival finds a step half done, on average.
            under_way = decode_load(context_tokens=0, sequences=0, tokens_each=1, beside=beside)
            seconds += 0.5 * (state.step.seconds(under_way) * self._scale(mode.variant, "decode"))
        seconds += snapshot.loading_s.get(mode.variant, 0.0)
        return self._overhead.seconds + seconds + passes * (other_s + self._gap.seconds)

    def _queue_load(self, snapshot: Snapshot, beside: Beside) -> StepLoad:
        """The prompts before ours: of equal length, and cut into the same chunks."""
        tokens = snapshot.waiting_prefill_tokens
        load = prefill_load(tokens, start=0, chunk_tokens=self._chunk_tokens, beside=beside)
        mean = tokens / max(1, snapshot.waiting)
        pairs = tokens * (mean + 1) / 2 + load.passes * beside.context_tokens
        return replace(load, attended_pairs=pairs)

    def _passes(self, mode: Mode, snapshot: Snapshot, work: Work) -> _Passes:
        state = self._state(mode.variant)
        beside, other_s = self._beside(mode, snapshot, waiting=snapshot.waiting)
        context = snapshot.prompt_tokens + work.max_tokens / 2

        def pass_s(tokens_each: int) -> float:
            return state.step.seconds(
                decode_load(
                    context_tokens=context, sequences=work.choices, tokens_each=tokens_each, beside=beside
                )
            )

        pause_s = other_s + self._gap.seconds
        plain = pass_s(1) * self._scale(mode.variant, "decode", snapshot.adapter)
        if (spec := mode.speculation) is None:
            return _Passes(plain + pause_s, plain + pause_s)
        verify_scale = self._scale(mode.variant, "verify", snapshot.adapter)
        longest = max(plain, pass_s(1 + spec.max_draft_tokens) * verify_scale)
        if spec.draft_variant is not None:
            draft = decode_load(
                context_tokens=context, sequences=work.choices, tokens_each=1, beside=Beside()
            )
            longest += spec.max_draft_tokens * self._draft_s(spec.draft_variant, draft, snapshot.adapter)
        return _Passes(plain + pause_s, longest + pause_s)

    def _draft_s(self, variant: Variant, load: StepLoad, adapter: str | None) -> float:
        """One pass that only drafts; until one was measured, a full pass bounds it from above."""
        state = self._state(variant)
        if state.draft is None:
            return state.step.seconds(load) * self._scale(variant, "decode", adapter)
        return state.draft.seconds(load) * self._scale(variant, "draft", adapter)

    def _beside(self, mode: Mode, snapshot: Snapshot, *, waiting: int) -> tuple[Beside, float]:
        """(what shares our passes, seconds of a pass of another variant that runs between ours).

        A pass has one variant: sequences that decode with another take turns with ours.
        """
        running = Beside(sequences=snapshot.running, context_tokens=snapshot.running_context_tokens)
        other_s = 0.0
        if snapshot.running and snapshot.running_variant not in (None, mode.variant):
            other = snapshot.running_variant
            turn = decode_load(context_tokens=0, sequences=0, tokens_each=1, beside=running)
            other_s = self._state(other).step.seconds(turn) * self._scale(other, "decode")
            running = Beside()
        joined = Beside(
            sequences=running.sequences + waiting,
            context_tokens=running.context_tokens + (snapshot.waiting_prefill_tokens if waiting else 0),
        )
        return joined.capped(mode.batch_cap - 1), other_s

    @staticmethod
    def _cached(mode: Mode, snapshot: Snapshot) -> int:
        if not mode.prefix_cache:
            return 0
        own = snapshot.cached_tokens.get(mode.variant, 0)
        return max(own, snapshot.cached_mixed_tokens) if mode.mix_cache else own

    def _errors_of(self, variant: Variant) -> Errors:
        """The variant's samples; while they are few, with those of other variants and assumed ones."""
        state = self._state(variant)
        windows = [state.samples]
        spread = _ASSUMED_SPREAD if state.assumed else _CALIBRATED_SPREAD
        if len(windows[0]) < _POOL_BELOW and not state.assumed:
            others = (each for each in self._states.values() if each is not state)
            windows += [each.samples for each in others if not each.assumed]
        key = (spread, *(id(window) for window in windows if window))
        if (found := self._errors.get(key)) is None:
            samples = [sample for window in windows for sample in window]
            if (missing := _ENOUGH - len(samples)) > 0:
                samples += assumed_samples(missing, log_deviation=max(spread, log_spread(samples)))
            found = self._errors[key] = Errors(samples)
        return found

    def _forget_errors(self, changed: deque[Sample]) -> None:
        """What was made of other windows still holds."""
        self._errors = {key: each for key, each in self._errors.items() if id(changed) not in key}

    def _observe_drafted(
        self, mode: Mode, snapshot: Snapshot, timeline: Timeline, measured: _Measured
    ) -> None:
        """Keep what became of an answer's drafts, with the error of a prediction that had known it."""
        assert mode.speculation is not None
        found = acceptance_of(mode, timeline)
        if found is None or measured.tpot_ms is None:
            return
        rate, share = found
        passes = self._passes(mode, snapshot, Work(max_tokens=timeline.n_tokens))
        tokens = expected_tokens(rate, mode.speculation.max_draft_tokens)
        ratio = _ratio(measured.tpot_ms, passes.tpot_s(share, tokens) * 1e3)
        drafted = Drafted(repetition=snapshot.repetition, rate=rate, share=share, ratio=ratio)
        self._drafting.add(mode, drafted)

    def _observe_steps(self, steps: Sequence[StepTime], adapter: str | None) -> None:
        drafting = [step for step in steps if step.drafting]
        self._observe_drafting(drafting, adapter)
        if drafting:
            steps = [step for step in steps if not step.drafting]
        ratios: dict[tuple[Variant, Phase], list[float]] = {}
        # A long answer has thousands of steps; some hundred, spread over it, tell the same.
        for step in (*steps[:4], *steps[4 :: max(1, len(steps) // 256)]):
            duration = step.ended_at_s - step.started_at_s
            if duration > 0 and step.variant in self._states:
                predicted = self._states[step.variant].step.step_seconds(step)
                if predicted > 0:
                    ratios.setdefault((step.variant, _phase(step)), []).append(duration / predicted)
        for (variant, phase), found in ratios.items():
            self._follow(variant, phase, adapter, median(found))

    def _observe_drafting(self, steps: Sequence[StepTime], adapter: str | None) -> None:
        by_variant: dict[Variant, list[StepTime]] = {}
        for step in steps:
            if step.ended_at_s > step.started_at_s:
                by_variant.setdefault(step.variant, []).append(step)
        for variant, found in by_variant.items():
            state = self._state(variant)
            if state.draft is None:
                state.draft_seen += found
                if len(state.draft_seen) >= _DRAFTS_TO_FIT:
                    state.draft, state.drifts["draft"] = fit(state.draft_seen), Drift()
                    state.draft_seen = []
                continue
            ratios = [
                (step.ended_at_s - step.started_at_s) / predicted
                for step in found[:: max(1, len(found) // 256)]
                if (predicted := state.draft.step_seconds(step)) > 0
            ]
            if ratios:
                self._follow(variant, "draft", adapter, median(ratios))

    def _observe_pauses(self, timeline: Timeline) -> None:
        if timeline.started_at_s is not None:
            self._overhead.observe(timeline.started_at_s - timeline.submitted_at_s)
        gaps = [
            after.started_at_s - before.ended_at_s
            for before, after in zip(timeline.steps, timeline.steps[1:], strict=False)
        ]
        if gaps:
            self._gap.observe(median(gaps))

    def _observe_phases(self, variant: Variant, timeline: Timeline, adapter: str | None) -> None:
        phases: tuple[Phase, Phase] = ("prefill", "decode")
        for step, phase in zip(phase_steps(timeline), phases, strict=False):
            predicted = self._state(variant).step.step_seconds(step)
            if predicted > 0:
                ratio = (step.ended_at_s - step.started_at_s) / predicted
                self._follow(variant, phase, adapter, ratio)

    def _refit(self, state: _State) -> None:
        """Replace the guess by a fit to the traffic seen, and take the errors anew against the fit.

        Errors within the fitted data are too small; their logarithms are widened by sqrt(n / (n - p))
        for the p = 4 coefficients that such traffic can tell apart.
        """
        steps = [step for _, _, timeline in state.seen for step in (timeline.steps or phase_steps(timeline))]
        variant = state.seen[0][0].variant
        own = [step for step in steps if step.variant is variant and not step.drafting]
        if not own:
            return
        state.step = fit(own)
        state.drifts |= {"prefill": Drift(), "decode": Drift(), "verify": Drift()}
        n = len(state.seen)
        widening = math.sqrt(n / max(1, n - 4))
        state.samples.clear()
        for mode, snapshot, timeline in state.seen:
            measured = _measured(mode, timeline)
            assert measured is not None
            forecast = self.forecast(mode, snapshot, Work(max_tokens=timeline.n_tokens))
            ttft, tpot, e2e = _ratios(measured, forecast)
            state.samples.append((ttft**widening, None if tpot is None else tpot**widening, e2e**widening))


def _measured(mode: Mode, timeline: Timeline) -> _Measured | None:
    """The durations, or None where they say nothing of the mode: no token, or moved to another mode."""
    ttft = timeline.ttft_ms()
    spec = mode.speculation
    expected = {mode.variant, spec.draft_variant if spec is not None else None}
    if ttft is None or any(step.variant not in expected for step in timeline.steps):
        return None
    e2e = timeline.e2e_ms()
    if e2e is None:
        e2e = (timeline.tokens[-1].made_at_s - timeline.submitted_at_s) * 1e3
    measured = _Measured(ttft, timeline.tpot_ms(), e2e)
    return measured if all(each is None or math.isfinite(each) for each in measured) else None


def _spread_ttft(plain: Errors, tpot: FloatArray, weights: FloatArray) -> FloatArray:
    """Ratios of TTFT for each outcome of the drafts, which do not touch it: the variant's own errors.

    They stand in the order of the TPOTs, since what slows one phase of a machine slows the others.
    """
    order = np.argsort(tpot)
    ranks = np.empty(len(tpot))
    ranks[order] = (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum()
    return np.interp(ranks, _TTFT_RANKS, [plain.ttft(q) for q in _TTFT_RANKS])


def _phase(step: StepTime) -> Phase:
    if step.prefill_tokens:
        return "prefill"
    return "verify" if step.decode_tokens > step.n_sequences else "decode"


def _ratios(measured: _Measured, forecast: Forecast) -> Sample:
    tpot = None
    if measured.tpot_ms is not None and forecast.tpot_ms is not None:
        tpot = _ratio(measured.tpot_ms, forecast.tpot_ms)
    return _ratio(measured.ttft_ms, forecast.ttft_ms), tpot, _ratio(measured.e2e_ms, forecast.e2e_ms)


def _ratio(seen: float, predicted: float) -> float:
    return min(max(seen / max(predicted, 1e-6), 1 / _WIDEST_RATIO), _WIDEST_RATIO)
