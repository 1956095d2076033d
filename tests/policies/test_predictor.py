from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from statistics import mean, median
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline_engine.backends.base import ModelInfo
from paceline_engine.mode import Drafter, Mode, Speculation, Variant
from paceline_engine.snapshot import Snapshot
from paceline_engine.timeline import Timeline, TokenTime
from paceline_policies.calibration import assumed_profile
from paceline_policies.forecast import Work
from paceline_policies.judge import Remaining
from paceline_policies.predictor import Predictor

BF16, INT8 = Mode(variant=Variant.BF16), Mode(variant=Variant.INT8)


def traffic(
    machine: Any,
    predictor: Predictor,
    *,
    n: int,
    variants: tuple[Variant, ...] = (Variant.BF16, Variant.INT8, Variant.INT4),
    with_steps: bool = True,
    early: bool = False,
) -> tuple[list[list[bool]], list[list[float]]]:
    """Run and learn; (whether p90 covered, relative error of p50) of TTFT, TPOT and E2E."""
    rng = random.Random(machine.seed + 1)
    covered: list[list[bool]] = [[], [], []]
    errors: list[list[float]] = [[], [], []]
    for _ in range(n):
        variant = rng.choice(variants)
        mode = Mode(variant=variant)
        prompt, output = rng.choice([5, 40, 200, 700, 1400]), rng.choice([1, 5, 40, 90])
        running = rng.choice([0, 0, 2, 4]) if with_steps else 0
        cached = min(prompt - 1, rng.choice([0, 0, 128]))
        snapshot = Snapshot(
            taken_at_s=0.0,
            prompt_tokens=prompt,
            cached_tokens={variant: cached},
            running=running,
            running_context_tokens=running * 300,
            running_variant=variant if running else None,
        )
        predicted = predictor.predict(mode, snapshot, max_tokens=output)
        produced = rng.randint(1, output) if early else output
        line = machine.run(
            mode,
            prompt=prompt,
            output=produced,
            cached=cached,
            running=running,
            running_context=running * 300,
            with_steps=with_steps,
        )
        if not early:
            pairs = (
                (predicted.ttft, line.ttft_ms()),
                (predicted.tpot, line.tpot_ms()),
                (predicted.e2e, line.e2e_ms()),
            )
            for i, (estimate, measured) in enumerate(pairs):
                if estimate is not None and measured is not None:
                    covered[i].append(measured <= estimate.p90_ms)
                    errors[i].append(abs(measured / estimate.p50_ms - 1))
        predictor.observe(mode, snapshot, predicted, line)
    return covered, errors


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("noise", "worst"), [(0.05, 0.1), (0.2, 0.25)])
def test_calibrated_at_once(
    make_machine: Callable[..., Any], info: ModelInfo, seed: int, noise: float, worst: float
) -> None:
    """From the first generation on p50 is near, and p90 covers about nine in ten."""
    machine = make_machine(seed=seed, noise=noise)
    covered, errors = traffic(machine, machine.calibrated(info), n=150)
    for each in covered:
        assert 0.83 <= mean(each) <= 1.0
    assert max(median(each) for each in errors) < worst


@pytest.mark.parametrize("slowdown", [2.0, 0.5])
def test_drift_is_followed(make_machine: Callable[..., Any], info: ModelInfo, slowdown: float) -> None:
    """After a lasting change of speed by a factor of two, p50 and p90 hold again within 30 generations."""
    machine = make_machine(seed=4)
    predictor = machine.calibrated(info)
    traffic(machine, predictor, n=30)
    machine.slowdown = slowdown
    traffic(machine, predictor, n=30)
    covered, errors = traffic(machine, predictor, n=90)
    assert max(median(each) for each in errors) < 0.12
    assert min(mean(each) for each in covered) >= 0.85


def test_heavy_tails_are_covered(make_machine: Callable[..., Any], info: ModelInfo) -> None:
    """Where one generation in five is slowed by a Pareto factor, p90 widens until it covers nine in ten."""
    machine = make_machine(seed=6, slow_share=0.2)
    predictor = machine.calibrated(info)
    traffic(machine, predictor, n=90)
    covered, _ = traffic(machine, predictor, n=200)
    assert min(mean(each) for each in covered) >= 0.85


def test_one_outlier_moves_nothing(make_machine: Callable[..., Any], info: ModelInfo) -> None:
    """A single generation that is a hundred times slower leaves p50 and p90 where they were."""
    machine = make_machine(seed=8, noise=0.01)
    predictor = machine.calibrated(info)
    traffic(machine, predictor, n=60)
    snapshot = Snapshot(taken_at_s=0.0, prompt_tokens=200)
    before = predictor.predict(BF16, snapshot, max_tokens=40)
    machine.slowdown = 100.0
    predictor.observe(BF16, snapshot, before, machine.run(BF16, prompt=200, output=40))
    after = predictor.predict(BF16, snapshot, max_tokens=40)
    assert after.e2e.p50_ms == pytest.approx(before.e2e.p50_ms, rel=0.05)
    assert after.ttft.p90_ms == pytest.approx(before.ttft.p90_ms, rel=0.1)


def test_early_end_is_compared_with_what_was_produced(
    make_machine: Callable[..., Any], info: ModelInfo
) -> None:
    """Generations that end long before their cap do not make the predictor believe in a faster machine."""
    machine = make_machine(seed=9)
    predictor = machine.calibrated(info)
    traffic(machine, predictor, n=60, early=True)
    covered, errors = traffic(machine, predictor, n=60)
    assert max(median(each) for each in errors) < 0.12
    assert min(mean(each) for each in covered) >= 0.8


def test_useless_timelines_are_ignored(calibrated: Predictor, make_machine: Callable[..., Any]) -> None:
    """No token, times that are not finite, or a stream moved to another variant teach no durations."""
    predictor = Predictor(calibrated.profile)
    snapshot = Snapshot(taken_at_s=0.0, prompt_tokens=100)
    before = predictor.predict(BF16, snapshot, max_tokens=20)
    broken = (
        Timeline(mode=BF16, submitted_at_s=1.0),
        Timeline(mode=BF16, submitted_at_s=1.0, finished_at_s=90.0),
        Timeline(mode=BF16, submitted_at_s=float("nan"), tokens=(TokenTime(made_at_s=2.0),)),
    )
    moved = make_machine(seed=1).run(INT8, prompt=100, output=20)
    for line in (*broken, replace(moved, mode=BF16)):
        predictor.observe(BF16, snapshot, before, line)
    assert predictor.predict(BF16, snapshot, max_tokens=20) == before


def test_cancelled_generation_still_tells_of_its_steps(
    calibrated: Predictor, make_machine: Callable[..., Any]
) -> None:
    """Cancelled during a slow prefill, repeatedly, a generation slows the next prediction."""
    predictor = Predictor(calibrated.profile)
    snapshot = Snapshot(taken_at_s=0.0, prompt_tokens=400)
    before = predictor.predict(BF16, snapshot, max_tokens=20)
    machine = make_machine(seed=1, slowdown=3.0)
    for _ in range(10):
        line = machine.run(BF16, prompt=400, output=1)
        predictor.observe(BF16, snapshot, before, replace(line, tokens=()))
    assert predictor.predict(BF16, snapshot, max_tokens=20).ttft.p50_ms > 2 * before.ttft.p50_ms


def test_remote_backend_is_learned_from_phases(make_machine: Callable[..., Any], info: ModelInfo) -> None:
    """Without calibration or step records, traffic alone teaches the same form."""
    machine = make_machine(seed=3)
    predictor = Predictor(assumed_profile(info), chunk_tokens=512)
    assert not predictor.knows(Variant.BF16)
    wide = predictor.predict(BF16, Snapshot(taken_at_s=0.0, prompt_tokens=300), max_tokens=20)
    assert wide.e2e.p90_ms > 1.7 * wide.e2e.p50_ms
    traffic(machine, predictor, n=60, variants=(Variant.BF16,), with_steps=False)
    covered, errors = traffic(machine, predictor, n=60, variants=(Variant.BF16,), with_steps=False)
    assert predictor.knows(Variant.BF16)
    assert max(median(each) for each in errors) < 0.2
    assert min(mean(each) for each in covered) >= 0.8


def test_sparse_samples_borrow_from_other_variants(calibrated: Predictor) -> None:
    """A variant without samples of its own is judged by the errors of the others."""
    profile = calibrated.profile
    slow = {
        Variant.BF16: replace(profile.variants[Variant.BF16], samples=()),
        Variant.INT8: replace(profile.variants[Variant.INT8], samples=((3.0, 3.0, 3.0),) * 30),
    }
    predictor = Predictor(replace(profile, variants=slow))
    forecast = predictor.forecast(BF16, Snapshot(taken_at_s=0.0, prompt_tokens=50), Work(max_tokens=10))
    assert forecast.at(0.5).ttft_ms == pytest.approx(3 * forecast.ttft_ms)


def test_what_one_variant_learns_reaches_those_that_borrow(
    calibrated: Predictor, make_machine: Callable[..., Any]
) -> None:
    """A borrowed error is taken anew once its owner has learned, though it was asked for before."""
    profile = calibrated.profile
    variants = {variant: replace(each, samples=()) for variant, each in profile.variants.items()}
    predictor = Predictor(replace(profile, variants=variants))
    int8, snapshot = Mode(variant=Variant.INT8), Snapshot(taken_at_s=0.0, prompt_tokens=50)
    before = predictor.forecast(int8, snapshot, Work(max_tokens=10)).at(0.5)
    machine = make_machine(slowdown=3.0)
    for _ in range(20):
        predictor.observe(BF16, snapshot, None, machine.run(BF16, prompt=50, output=10))
    after = predictor.forecast(int8, snapshot, Work(max_tokens=10)).at(0.5)
    assert after.ttft_ms > 1.05 * before.ttft_ms


counts = st.integers(0, 3000)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    prompt=st.integers(1, 3000),
    more=counts,
    cached=counts,
    running=st.integers(0, 4),
    waiting=st.integers(0, 2),
)
def test_more_work_never_predicts_less(
    calibrated: Predictor, prompt: int, more: int, cached: int, running: int, waiting: int
) -> None:
    """Longer prompts, longer answers, busier engines and smaller cached prefixes never look faster."""
    base = Snapshot(
        taken_at_s=0.0,
        prompt_tokens=prompt,
        cached_tokens={Variant.BF16: cached},
        running=running,
        running_context_tokens=running * 100,
        waiting=waiting,
        waiting_prefill_tokens=waiting * 50,
    )

    def e2e(snapshot: Snapshot, max_tokens: int = 50) -> float:
        return calibrated.predict(BF16, snapshot, max_tokens=max_tokens).e2e.p90_ms

    now = e2e(base) * (1 - 1e-9)
    assert e2e(replace(base, prompt_tokens=prompt + more)) >= now
    assert e2e(base, 50 + more) >= now
    assert e2e(replace(base, running=running + 1, running_context_tokens=(running + 1) * 100 + more)) >= now
    assert e2e(replace(base, waiting=waiting + 1, waiting_prefill_tokens=(waiting + 1) * 50 + more)) >= now
    assert e2e(replace(base, cached_tokens={Variant.BF16: max(0, cached - more)})) >= now


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_smallest_requests(calibrated: Predictor, max_tokens: int) -> None:
    """A prompt of one token, wholly cached, has a prediction; TPOT only exists from two tokens on."""
    snapshot = Snapshot(taken_at_s=0.0, prompt_tokens=1, cached_tokens={Variant.BF16: 1})
    predicted = calibrated.predict(BF16, snapshot, max_tokens=max_tokens)
    assert 0 < predicted.ttft.p50_ms <= predicted.ttft.p90_ms <= predicted.e2e.p90_ms
    assert (predicted.tpot is None) == (max_tokens == 1)


def test_choosing_decodes_nothing(calibrated: Predictor) -> None:
    """Scoring options costs a prefill that grows with them; only the end-to-end budget counts."""
    snapshot = Snapshot(taken_at_s=0.0, prompt_tokens=100)
    few = calibrated.predict(BF16, snapshot, max_tokens=1, kind="choose", option_tokens=(1, 2))
    single = calibrated.predict(BF16, snapshot, max_tokens=1, kind="choose", option_tokens=(1, 1, 1))
    many = calibrated.predict(BF16, snapshot, max_tokens=1, kind="choose", option_tokens=(1, 2, 300))
    assert single == calibrated.predict(BF16, snapshot, max_tokens=1)
    assert few.e2e.p50_ms > single.e2e.p50_ms
    assert few.tpot is None
    assert few.e2e == few.ttft
    assert many.e2e.p50_ms > few.e2e.p50_ms
    forecast = calibrated.forecast(BF16, snapshot, Work(kind="choose", option_tokens=(3,)))
    assert forecast.p_meet(Remaining(ttft_ms=0.001, e2e_ms=1e5)) > 0.9
    assert forecast.p_meet(Remaining(e2e_ms=0.001)) == 0


def test_sequences_of_another_variant_take_turns(calibrated: Predictor) -> None:
    """Running sequences of another variant cost a pass of their own between ours."""
    base = Snapshot(taken_at_s=0.0, prompt_tokens=100, running=3, running_context_tokens=300)
    same = calibrated.predict(INT8, replace(base, running_variant=Variant.INT8), max_tokens=30)
    other = calibrated.predict(INT8, replace(base, running_variant=Variant.BF16), max_tokens=30)
    assert same.tpot is not None
    assert other.tpot is not None
    assert other.tpot.p50_ms > 1.5 * same.tpot.p50_ms


def test_acceptance_is_learned(calibrated: Predictor) -> None:
    """Drafts that are nearly always right make speculation look faster, drafts never right slower."""
    mode = Mode(variant=Variant.BF16, speculation=Speculation(drafter=Drafter.NGRAM, max_draft_tokens=4))
    snapshot = Snapshot(taken_at_s=0.0, prompt_tokens=50)

    def tpot_after(tokens_per_pass: int) -> float:
        predictor = Predictor(calibrated.profile)
        tokens = [TokenTime(made_at_s=1.0)]
        tokens += [TokenTime(made_at_s=1.0 + 0.04 * i, n_tokens=tokens_per_pass) for i in range(1, 11)]
        line = Timeline(
            mode=mode, submitted_at_s=0.9, tokens=tuple(tokens), finished_at_s=1.4, prompt_tokens=50
        )
        for _ in range(10):
            predictor.observe(mode, snapshot, None, line)
        return predictor.forecast(mode, snapshot, Work(max_tokens=40)).tpot_ms or 0.0

    unknown = calibrated.forecast(mode, snapshot, Work(max_tokens=40)).tpot_ms or 0.0
    assert tpot_after(5) < 0.5 * unknown
    assert tpot_after(5) < 0.5 * tpot_after(1)


def test_learning_survives_saving(make_machine: Callable[..., Any], info: ModelInfo) -> None:
    """A predictor made from a saved profile predicts what the one that was saved did."""
    machine = make_machine(seed=2, slowdown=1.5)
    predictor = machine.calibrated(info)
    traffic(machine, predictor, n=20)
    again = Predictor(predictor.profile.from_dict(predictor.profile.to_dict()), chunk_tokens=512)
    snapshot = Snapshot(taken_at_s=0.0, prompt_tokens=300, running=2, running_context_tokens=99)
    for mode in (BF16, INT8):
        mine, theirs = (each.predict(mode, snapshot, max_tokens=30) for each in (predictor, again))
        assert theirs.e2e.p90_ms == pytest.approx(mine.e2e.p90_ms)


def test_weights_that_have_yet_to_load_are_in_the_first_token_and_are_not_learned(
    make_machine: Callable[..., Any], info: ModelInfo
) -> None:
    """The wait is added for the variant that waits; a start that had it teaches nothing of later turns."""
    machine = make_machine(seed=3)
    predictor = machine.calibrated(info)
    there = Snapshot(taken_at_s=0.0, prompt_tokens=64)
    waits = replace(there, loading_s={Variant.BF16: 2.0})
    before = predictor.predict(BF16, there, max_tokens=8)
    late = predictor.predict(BF16, waits, max_tokens=8)
    assert late.ttft.p50_ms - before.ttft.p50_ms == pytest.approx(2000, rel=0.2)
    assert late.tpot == before.tpot
    assert predictor.predict(INT8, waits, max_tokens=8) == predictor.predict(INT8, there, max_tokens=8)
    for _ in range(8):
        line = machine.run(BF16, prompt=64, output=8)
        slow = replace(line, submitted_at_s=line.submitted_at_s - 3.0)
        predictor.observe(BF16, waits, None, slow)
    after = predictor.predict(BF16, there, max_tokens=8)
    assert after.ttft.p50_ms == pytest.approx(before.ttft.p50_ms, rel=0.2)
    assert after.ttft.p90_ms < 2 * before.ttft.p90_ms


def test_an_adapter_has_scales_of_its_own(make_machine: Callable[..., Any], info: ModelInfo) -> None:
    """Turn about with and without an adapter that slows each step, both are predicted right."""
    machine, slowed = make_machine(seed=4), make_machine(seed=4, slowdown=1.5)
    predictor = machine.calibrated(info)
    plain = Snapshot(taken_at_s=0.0, prompt_tokens=400)
    adapted = replace(plain, adapter="support")
    for _ in range(12):
        for snapshot, ran_on in ((plain, machine), (adapted, slowed)):
            predictor.observe(INT8, snapshot, None, ran_on.run(INT8, prompt=400, output=30))
    for snapshot, ran_on in ((plain, machine), (adapted, slowed)):
        predicted = predictor.predict(INT8, snapshot, max_tokens=30)
        line = ran_on.run(INT8, prompt=400, output=30)
        assert predicted.ttft.p50_ms == pytest.approx(line.ttft_ms(), rel=0.12)
        assert predicted.tpot is not None
        assert predicted.tpot.p50_ms == pytest.approx(line.tpot_ms(), rel=0.12)
    another = predictor.predict(INT8, replace(plain, adapter="another"), max_tokens=30)
    assert another == predictor.predict(INT8, plain, max_tokens=30)
