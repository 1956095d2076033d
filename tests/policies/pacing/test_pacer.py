from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline_engine.mode import Variant
from paceline_engine.schedule.base import SequenceKey, SequenceView, StepState
from paceline_policies.pacing import Pacer, StepNumbers
from paceline_policies.pacing.pacer import LEAST_CHUNK_TOKENS, PATIENCE_S
from paceline_policies.pacing.speeds import Speeds


def order(policy: Pacer, state: StepState) -> list[str]:
    return [key.request_id for key in policy.decide_step(state).prefill_order]


def test_without_streams_a_chunk_is_full(kit: Any) -> None:
    """Where nothing decodes, nothing can be held up: the chunk is the engine's largest."""
    state = kit.state((), (kit.view("long", remaining_tokens=2000),))
    assert Pacer(kit.numbers()).decide_step(state).prefill_tokens == 256


def test_a_chunk_leaves_a_stream_its_target(kit: Any) -> None:
    """The chunk is the largest with which the step is predicted to end before the next token is due."""
    stream = kit.view("stream", tpot_target_s=0.200)
    prompt = kit.view("long", remaining_tokens=2000)
    state = kit.state((stream,), (prompt,))
    chunk = Pacer(kit.numbers()).decide_step(state).prefill_tokens
    speeds = Speeds(kit.numbers())
    assert speeds.step_s((stream,), prefills=[(prompt, chunk)]) <= 0.9 * 0.200
    assert speeds.step_s((stream,), prefills=[(prompt, chunk + 1)]) > 0.9 * 0.200
    # 180 ms less a decode of 51 ms and a prefill's own 2 ms, at 2 ms a token.
    assert chunk == 63


def test_time_gone_by_since_the_last_token_counts(kit: Any) -> None:
    """A stream that has waited already gets the smaller rest of its target."""
    late = kit.state(
        (kit.view("s", tpot_target_s=0.2),), (kit.view("p", remaining_tokens=900),), now_s=100.05
    )
    assert Pacer(kit.numbers()).decide_step(late).prefill_tokens == 41


def test_the_tightest_stream_rules(kit: Any) -> None:
    """Of several streams the one whose token is due first sets the chunk; one without a target none."""
    prompt = kit.view("p", remaining_tokens=2000)
    tight, loose = kit.view("a", tpot_target_s=0.15), kit.view("b", tpot_target_s=0.5)
    free = kit.view("c")
    policy = Pacer(kit.numbers())
    both = policy.decide_step(kit.state((tight, loose, free), (prompt,))).prefill_tokens
    assert both == policy.decide_step(kit.state((tight, free, free), (prompt,))).prefill_tokens
    assert policy.decide_step(kit.state((free,), (prompt,))).prefill_tokens == 256


def test_another_variants_prompt_costs_a_pass_of_its_own(kit: Any) -> None:
    """A prompt of another variant than the stream's gets a smaller chunk: two passes run in the step."""
    stream = kit.view("s", tpot_target_s=0.2)
    own = kit.state((stream,), (kit.view("p", remaining_tokens=2000),))
    other = kit.state((stream,), (kit.view("p", remaining_tokens=2000, variant=Variant.INT8),))
    policy = Pacer(kit.numbers())
    assert policy.decide_step(other).prefill_tokens < policy.decide_step(own).prefill_tokens


def test_a_target_out_of_reach_starves_no_prompt(kit: Any) -> None:
    """Where decoding alone breaks the target, a prompt still gets as long as the decoding takes."""
    stream = kit.view("s", tpot_target_s=0.010)
    chunk = Pacer(kit.numbers()).decide_step(kit.state((stream,), (kit.view("p", remaining_tokens=900),)))
    assert LEAST_CHUNK_TOKENS < chunk.prefill_tokens < 40


def test_without_numbers_it_only_orders(kit: Any) -> None:
    """A policy that knows nothing of the machine leaves chunks and variants to the engine."""
    stream = kit.view("s", tpot_target_s=1e-9, fallback_variants=(Variant.INT4,))
    decision = Pacer(StepNumbers()).decide_step(kit.state((stream,), (kit.view("p", remaining_tokens=900),)))
    assert decision.prefill_tokens == 256
    assert decision.variants == {}


def test_least_slack_goes_first(kit: Any) -> None:
    """A long prompt goes before a short one that is due at the same time."""
    long = kit.view("long", remaining_tokens=500, first_token_by_s=103.0, arrival=2)
    short = kit.view("short", remaining_tokens=10, first_token_by_s=103.0, arrival=1)
    free = kit.view("free", remaining_tokens=10, submitted_at_s=100.0, arrival=0)
    assert order(Pacer(kit.numbers()), kit.state((), (free, short, long))) == ["long", "short", "free"]


def test_what_is_late_already_pushes_nothing_back(kit: Any) -> None:
    """A prompt that can no longer meet its first token's time goes by its deadline, behind what still can."""
    lost = kit.view("lost", remaining_tokens=500, first_token_by_s=100.1, submitted_at_s=99.0, arrival=1)
    well = kit.view("well", remaining_tokens=100, first_token_by_s=100.9, submitted_at_s=99.5, arrival=2)
    assert order(Pacer(kit.numbers()), kit.state((), (lost, well))) == ["well", "lost"]


def test_patience_ends(kit: Any) -> None:
    """What has waited past its patience goes before everything that is still in time."""
    old = kit.view("old", remaining_tokens=10, submitted_at_s=100.0 - PATIENCE_S - 0.1, arrival=1)
    urgent = kit.view("urgent", remaining_tokens=100, first_token_by_s=100.3, arrival=2)
    assert order(Pacer(kit.numbers()), kit.state((), (urgent, old))) == ["old", "urgent"]


def test_no_flood_of_urgent_prompts_starves_one_without_a_budget(kit: Any) -> None:
    """While an urgent prompt arrives in every step, one without a due time runs once its patience ends."""
    machine = kit.machine(Pacer(kit.numbers()), truth=kit.numbers(), slow=lambda now: 1.0)
    machine.prompts = [kit.view("patient", remaining_tokens=200, submitted_at_s=100.0)]
    for number in range(40):
        due_s = machine.now_s + 3.0
        machine.prompts.append(
            kit.view(f"u{number}", remaining_tokens=300, first_token_by_s=due_s, submitted_at_s=machine.now_s)
        )
        machine.step()
        if all(prompt.key.request_id != "patient" for prompt in machine.prompts):
            break
    assert machine.now_s < 100.0 + PATIENCE_S + 2.0


@pytest.mark.parametrize("error", [0.2, 1.0, 5.0])
def test_wrong_numbers_are_corrected_by_what_steps_take(kit: Any, error: float) -> None:
    """Told a speed five times too high or too low, chunks come to fit the target within some steps."""
    machine = kit.machine(Pacer(kit.numbers(error)), truth=kit.numbers(), slow=lambda now: 1.0)
    machine.streams = [kit.stream(kit.view("s", tpot_target_s=0.2, max_tokens=10_000))]
    machine.prompts = [kit.view("p", remaining_tokens=8000)]
    for _ in range(40):
        machine.step()
    assert all(0.15 < seconds <= 0.2 for seconds in machine.step_s[25:])


@st.composite
def views(draw: st.DrawFn, kit: Any, number: int, *, decodes: bool) -> SequenceView:
    times = st.none() | st.floats(min_value=-1e3, max_value=1e3)
    variant = draw(st.sampled_from([Variant.BF16, Variant.INT8, Variant.INT4, Variant.FP8]))
    return kit.view(
        f"{'d' if decodes else 'p'}{number}",
        variant=variant,
        arrival=number,
        remaining_tokens=1 if decodes else draw(st.integers(2, 5000)),
        computed_tokens=draw(st.integers(0, 5000)),
        first_token_by_s=draw(times),
        deadline_at_s=draw(times),
        tpot_target_s=draw(st.none() | st.floats(min_value=1e-6, max_value=100)),
        fallback_variants=draw(st.sampled_from([(), (Variant.INT8, Variant.INT4), (Variant.INT4,)])),
        submitted_at_s=draw(st.floats(min_value=-1e3, max_value=100)),
        output_tokens=draw(st.integers(1, 60)) if decodes else 0,
        variant_held=draw(st.booleans()),
    )


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_decision_is_within_bounds(kit: Any, data: st.DataObject) -> None:
    """Whatever the state and the numbers: all prompts are ordered once, chunks lie between one token and
    the engine's most, and a stream moves only where it may."""
    n_decoding, n_prefilling = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 4))
    decoding = tuple(data.draw(views(kit, i, decodes=True)) for i in range(n_decoding))
    prefilling = tuple(data.draw(views(kit, i, decodes=False)) for i in range(n_prefilling))
    scale = data.draw(st.sampled_from([0.0, 1e-9, 1.0, 1e9]))
    most = data.draw(st.integers(1, 512))
    state = kit.state(decoding, prefilling, max_prefill_tokens=most)
    decision = Pacer(kit.numbers(scale)).decide_step(state)
    assert sorted(key.request_id for key in decision.prefill_order) == sorted(
        view.key.request_id for view in prefilling
    )
    assert 1 <= decision.prefill_tokens <= most
    if prefilling:
        floor = min(LEAST_CHUNK_TOKENS, most, sum(view.remaining_tokens for view in prefilling))
        assert decision.prefill_tokens >= floor
    by_key: dict[SequenceKey, SequenceView] = {view.key: view for view in decoding}
    for key, to in decision.variants.items():
        view = by_key[key]
        assert to in (view.plan.mode.variant, *view.plan.fallback_variants)
        assert not view.variant_held
        assert decision.reasons[key]
