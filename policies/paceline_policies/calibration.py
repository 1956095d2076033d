"""Which probes teach a step model in seconds, and the profile that follows from their timelines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from paceline_engine.backends.base import ModelInfo
from paceline_engine.errors import InvalidValueError
from paceline_engine.mode import Variant
from paceline_engine.timeline import StepTime, Timeline
from paceline_policies.conformal import Sample, log_spread
from paceline_policies.modes import offered_variants
from paceline_policies.profile import Profile, VariantProfile
from paceline_policies.quality import Quality
from paceline_policies.step_model import StepModel, fit, phase_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Ordinary requests, all submitted at once, with the prefix cache off and end tokens ignored."""

    variant: Variant
    prompt_tokens: int
    max_tokens: int
    concurrency: int = 1


_FULL = (
    # (prompt tokens, output tokens, concurrency): short prompts say what a pass costs, long ones what
    # a token costs; sizes are mixed, so that a slow moment does not hit one end alone.
    (1, 6, 1),
    (1024, 6, 1),
    (64, 5, 1),
    (16, 8, 4),
    (4, 8, 1),
    (200, 4, 1),
    (32, 5, 4),
    (128, 4, 1),
    (24, 5, 1),
    (1, 4, 1),
    (80, 3, 1),
)
_QUICK = ((1, 6, 1), (320, 6, 1), (32, 6, 1), (16, 6, 4), (128, 6, 1), (1, 4, 1))


def probes(info: ModelInfo, quick: bool = False) -> tuple[Probe, ...]:
    """What to run, in order; the first of each variant warms it up and is not fitted.

    About 1,750 prompt tokens and 60 passes for each variant: with 350 prompt tokens per second and 40 ms
    a pass some 7 s, a third of it in the longest prompt; ``quick`` needs half. Sizes that the
    context does not hold are cut to what it holds. Variants take turns, so that a change of the
    machine's speed meets all of them alike.
    """
    found: list[Probe] = []
    for prompt, output, concurrency in ((4, 2, 1), *(_QUICK if quick else _FULL)):
        max_tokens = max(1, min(output, info.context_tokens - 1))
        prompt_tokens = max(1, min(prompt, info.context_tokens - max_tokens))
        found.extend(
            Probe(
                variant=variant,
                prompt_tokens=prompt_tokens,
                max_tokens=max_tokens,
                concurrency=concurrency,
            )
            for variant in offered_variants(info)
        )
    return tuple(found)


def fit_profile(
    info: ModelInfo,
    runs: Iterable[tuple[Probe, Timeline]],
    *,
    version: str = "",
    qualities: Mapping[Variant, Quality] | None = None,
) -> Profile:
    """The profile that follows from the probes' timelines (one for each of a probe's requests).

    The errors are seeded by leaving one probe out: each is predicted by a fit to all others, so that
    p90 means something before the first real generation.

    Raises:
        InvalidValueError: a variant has no usable timeline.
    """
    by_variant: dict[Variant, list[tuple[Probe, Timeline]]] = {}
    for probe, timeline in runs:
        by_variant.setdefault(probe.variant, []).append((probe, timeline))
    if not by_variant:
        raise InvalidValueError(
            "runs", observed=0, limit="at least one timeline", remedy="run the probes that probes() gives"
        )
    warm = {variant: _warm(found) for variant, found in by_variant.items()}
    alone = [line for found in warm.values() for probe, line in found if probe.concurrency == 1]
    overhead_s = _median(
        [line.started_at_s - line.submitted_at_s for line in alone if line.steps and line.started_at_s]
    )
    gap_s = _median([gap for line in alone for gap in _gaps(line)])
    variants = {variant: _fit_variant(found, overhead_s, gap_s) for variant, found in warm.items()}
    speeds = {
        variant: info.bytes_per_variant[variant] / seconds
        for variant, each in variants.items()
        if variant in info.bytes_per_variant and (seconds := each.step.fixed_s + each.step.decode_s) > 0
    }
    return Profile(
        fingerprint=info.fingerprint,
        device=info.device_name or info.device,
        version=version,
        speed_facts=dict(info.speed_facts),
        variants=variants,
        qualities=dict(qualities or {}),
        overhead_s=overhead_s,
        gap_s=gap_s,
        read_bytes_per_s=speeds,
    )


def assumed_profile(info: ModelInfo, *, version: str = "") -> Profile:
    """The profile of a backend that is learned from its traffic alone, such as a remote server.

    It knows no variant; predictions start from a guess with wide errors, and give way to fits.
    """
    return Profile(fingerprint=info.fingerprint, device=info.device_name or info.device, version=version)


def _warm(runs: Sequence[tuple[Probe, Timeline]]) -> list[tuple[Probe, Timeline]]:
    """Without the first run, which pays for cold caches and first allocations, where others are left."""
    usable = [run for run in runs if run[1].tokens]
    return usable[1:] if len(usable) > 2 else usable


def _fit_variant(runs: Sequence[tuple[Probe, Timeline]], overhead_s: float, gap_s: float) -> VariantProfile:
    per_run = [(probe, line, _steps_of(line)) for probe, line in runs]
    step = fit(_distinct(steps for _, _, steps in per_run))
    samples: list[Sample] = []
    for i, (probe, line, steps) in enumerate(per_run):
        # Beside others, the wait for their prefill is not in this timeline's own steps.
        others = _distinct(steps for j, (_, _, steps) in enumerate(per_run) if j != i)
        if probe.concurrency == 1 and others:
            model = fit(others, knees=(step.knee,))
            if (sample := _left_out(model, line, steps, overhead_s, gap_s)) is not None:
                samples.append(sample)
    return VariantProfile(step=step, samples=tuple(_without_stalls(samples)))


def _without_stalls(samples: Sequence[Sample]) -> list[Sample]:
    """Without samples beyond five robust deviations of the others.

    Among a dozen probes, one that the rest of the machine stalled would rule p90 until traffic has
    pushed it out. If stalls are usual there, traffic will tell.
    """
    if not samples:
        return []
    middle = median(math.log(sample[2]) for sample in samples)
    far = 5 * max(0.1, log_spread(samples))
    return [
        sample
        for sample in samples
        if all(each is None or abs(math.log(each) - middle) <= far for each in sample)
    ]


def _left_out(
    model: StepModel, line: Timeline, steps: Sequence[StepTime], overhead_s: float, gap_s: float
) -> Sample | None:
    """Ratios measured / predicted of a timeline whose steps the model has not seen."""
    ttft_ms, tpot_ms, e2e_ms = line.ttft_ms(), line.tpot_ms(), line.e2e_ms()
    pause = gap_s if line.steps else 0.0
    prefill = [model.step_seconds(step) + pause for step in steps if step.prefill_tokens]
    decode = [model.step_seconds(step) + pause for step in steps if not step.prefill_tokens]
    ttft_s = sum(prefill) + (overhead_s if line.steps else 0.0)
    if ttft_ms is None or ttft_s <= 0:
        return None
    after = line.n_tokens - 1
    tpot_s = sum(decode) / len(decode) if decode else 0.0
    if tpot_ms is None or tpot_s <= 0:
        ratio = ttft_ms / 1e3 / ttft_s
        return (ratio, None, ratio) if ratio > 0 else None
    e2e_s = ttft_s + tpot_s * after
    total_ms = e2e_ms if e2e_ms is not None else ttft_ms + tpot_ms * after
    sample = (ttft_ms / 1e3 / ttft_s, tpot_ms / 1e3 / tpot_s, total_ms / 1e3 / e2e_s)
    return sample if min(sample) > 0 else None


def _steps_of(line: Timeline) -> tuple[StepTime, ...]:
    own = tuple(step for step in line.steps if step.variant is line.mode.variant)
    return own or phase_steps(line)


def _distinct(groups: Iterable[Sequence[StepTime]]) -> list[StepTime]:
    """Steps that several sequences shared stand in the timeline of each: keep one."""
    return list({(step.started_at_s, step.variant): step for steps in groups for step in steps}.values())


def _gaps(line: Timeline) -> list[float]:
    pairs = zip(line.steps, line.steps[1:], strict=False)
    return [max(0.0, after.started_at_s - before.ended_at_s) for before, after in pairs]


def _median(values: Sequence[float]) -> float:
    return max(0.0, median(values)) if values else 0.0
