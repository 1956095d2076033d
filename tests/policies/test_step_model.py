from __future__ import annotations

import random

import pytest

from paceline_engine.errors import InvalidValueError
from paceline_engine.mode import Mode, Variant
from paceline_engine.timeline import StepTime, Timeline, TokenTime
from paceline_policies.step_model import StepModel, fit, phase_steps
from paceline_policies.workload import Beside, decode_load, prefill_load


def step(seconds: float, *, prefill: int = 0, decode: int = 0, context: int = 0, pairs: int = 0) -> StepTime:
    return StepTime(
        started_at_s=1.0,
        ended_at_s=1.0 + seconds,
        variant=Variant.BF16,
        prefill_tokens=prefill,
        decode_tokens=decode,
        n_sequences=max(1, decode),
        context_tokens=context,
        attended_pairs=pairs or context,
    )


def steps_of(truth: StepModel, *, noise: float = 0.0, seed: int = 0) -> list[StepTime]:
    rng = random.Random(seed)
    found: list[StepTime] = []
    for prefill in (1, 4, 16, 24, 40, 64, 128, 256, 512):
        blank = step(1.0, prefill=prefill, context=prefill, pairs=prefill * (prefill + 1) // 2)
        found.append(blank)
    found += [step(1.0, decode=n, context=n * length) for n in (1, 2, 4) for length in (10, 300, 1200)]
    return [
        step(
            truth.step_seconds(each) * rng.lognormvariate(0, noise),
            prefill=each.prefill_tokens,
            decode=each.decode_tokens,
            context=each.context_tokens,
            pairs=each.attended_pairs,
        )
        for each in found * 4
    ]


TRUTH = StepModel(
    fixed_s=0.02, chunk_s=0.005, small_s=2e-4, large_s=1e-3, decode_s=1e-3, kv_s=2e-6, pair_s=2e-8, knee=16
)


@pytest.mark.parametrize(
    "truth", [TRUTH, StepModel(fixed_s=0.03, small_s=3e-3, large_s=5e-4, knee=64), StepModel(fixed_s=0.01)]
)
def test_fit_recovers_the_form(truth: StepModel) -> None:
    """Without noise the fit reproduces every step, whether tokens get dearer or cheaper past the knee."""
    model = fit(steps_of(truth))
    assert model.error < 1e-6
    for each in steps_of(truth):
        assert model.step_seconds(each) == pytest.approx(truth.step_seconds(each), rel=1e-3)


def test_outliers_do_not_bend_the_fit() -> None:
    """One step in eight that takes five times as long moves the predictions by a few percent."""
    steps = steps_of(TRUTH, noise=0.03)
    rng = random.Random(1)
    for i in rng.sample(range(len(steps)), len(steps) // 8):
        each = steps[i]
        steps[i] = step(
            5 * (each.ended_at_s - each.started_at_s),
            prefill=each.prefill_tokens,
            decode=each.decode_tokens,
            context=each.context_tokens,
            pairs=each.attended_pairs,
        )
    model = fit(steps)
    for each in steps_of(TRUTH):
        assert model.step_seconds(each) == pytest.approx(TRUTH.step_seconds(each), rel=0.15)


def test_degenerate_steps() -> None:
    """One step is enough, equal steps have no error, and no usable step is refused."""
    one = fit([step(0.05, decode=1, context=10)])
    assert one.step_seconds(step(1, decode=1, context=10)) == pytest.approx(0.05)
    assert fit([step(0.05, decode=1, context=10)] * 9).error == pytest.approx(0.0, abs=1e-9)
    with pytest.raises(InvalidValueError):
        fit([step(0.0, decode=1)])
    with pytest.raises(InvalidValueError):
        fit([])


@pytest.mark.parametrize(
    ("tokens", "start", "chunk"), [(1, 0, 512), (512, 0, 512), (700, 100, 512), (9, 5, 2)]
)
def test_closed_form_equals_the_steps(tokens: int, start: int, chunk: int) -> None:
    """The load of a chunked prefill is the sum of the loads of its steps."""
    beside = Beside(sequences=3, context_tokens=900)
    load = prefill_load(tokens, start=start, chunk_tokens=chunk, beside=beside)
    seconds, done = 0.0, 0
    while done < tokens:
        size = min(chunk, tokens - done)
        pairs = sum(start + done + j + 1 for j in range(size)) + 900
        seconds += TRUTH.step_seconds(step(1, prefill=size, decode=3, context=900, pairs=pairs))
        done += size
    assert TRUTH.seconds(load) == pytest.approx(seconds)


def test_decode_load_equals_the_step() -> None:
    """A decode pass costs the same as load and as step."""
    load = decode_load(
        context_tokens=100, sequences=1, tokens_each=1, beside=Beside(sequences=2, context_tokens=50)
    )
    assert TRUTH.seconds(load) == pytest.approx(TRUTH.step_seconds(step(1, decode=3, context=150)))
    assert Beside(sequences=4, context_tokens=400).capped(1) == Beside(sequences=1, context_tokens=100)


def test_phases_stand_for_steps() -> None:
    """A timeline without step records gives one prefill and one decode step; without tokens, none."""
    mode = Mode(variant=Variant.BF16)
    line = Timeline(
        mode=mode,
        submitted_at_s=1.0,
        tokens=(TokenTime(made_at_s=1.5), TokenTime(made_at_s=2.5, n_tokens=10)),
        prompt_tokens=100,
        cached_tokens=60,
    )
    prefill, decode = phase_steps(line)
    assert prefill.prefill_tokens == 40
    assert prefill.attended_pairs == sum(range(61, 101))
    assert decode.ended_at_s - decode.started_at_s == pytest.approx(0.1)
    assert phase_steps(Timeline(mode=mode, submitted_at_s=1.0)) == ()
