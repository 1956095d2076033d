from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline_engine.mode import Variant
from paceline_engine.schedule.base import SequenceKey, StepDecision, StepState

MakeBench = Callable[..., Any]
GreedyIds = Callable[[Sequence[int], int], list[int]]


def test_decodes_run_beside_prefill_chunks(make_bench: MakeBench) -> None:
    """A running stream gets a token in every step while a long prompt is read in chunks."""
    bench = make_bench(max_prefill_tokens_per_step=4)
    bench.submit("stream", [1], bench.plan(20))
    bench.step()
    bench.submit("long", list(range(16)), bench.plan(1))
    bench.step(4)
    assert len(bench.out.ids("stream")) == 5
    assert bench.out.finish("long")


def test_urgent_first(make_bench: MakeBench) -> None:
    """Queued prompts run in order of first token due, then deadline, then arrival."""
    bench = make_bench(max_sequences=1)
    now = bench.clock.now_s
    bench.submit("last", [1], bench.plan(1))
    bench.submit("third", [2], bench.plan(1, deadline_at_s=now + 50))
    bench.submit("second", [3], bench.plan(1, first_token_by_s=now + 20))
    bench.submit("first", [4], bench.plan(1, first_token_by_s=now + 10, deadline_at_s=now + 90))
    bench.run()
    assert list(bench.out.chunks) == ["first", "second", "third", "last"]


def test_batch_caps_hold_for_all_that_share_a_step(make_bench: MakeBench) -> None:
    """No step holds more sequences than the smallest batch cap among them."""
    bench = make_bench(n_blocks=64)
    caps = {"a": 8, "b": 2, "c": 1, "d": 8, "e": 3}
    for i, (name, cap) in enumerate(caps.items()):
        bench.submit(name, [i, 3], bench.plan(5, batch_cap=cap))
    bench.submit("n", [9, 3], bench.plan(5, batch_cap=2), n=3)
    cap_of = {str(i): cap for i, cap in enumerate(caps.values())} | {"9": 2}

    def check(slices: Sequence[Any]) -> None:
        firsts = [
            bench.runner.kv[part.block_table[0]][0] if part.position else str(part.token_ids[0])
            for part in slices
        ]
        assert len(firsts) <= min(cap_of[first] for first in firsts)

    bench.runner.before_pass = check
    out = bench.run()
    assert all(len(out.ids(name)) == 5 for name in caps)
    assert len(out.ids("n", 2)) == 5
    assert not out.errors


def test_variants_run_in_passes_of_their_own(make_bench: MakeBench, greedy_ids: GreedyIds) -> None:
    """Sequences of one variant share a pass; two variants in a step are two passes."""
    bench = make_bench()
    for name, variant in (("a", "bf16"), ("b", "int4"), ("c", "bf16")):
        bench.submit(name, [1, 2, 3], bench.plan(variant=Variant(variant)))
    bench.step(2)
    assert [(str(variant), len(slices)) for variant, slices in bench.runner.passes] == [
        ("bf16", 2),
        ("int4", 1),
    ] * 2
    out = bench.run()
    assert out.ids("a") == out.ids("b") == greedy_ids([1, 2, 3], 8)


class _Scripted:
    """Prefills newest first, two tokens a step, and moves streams to int4 after their third token."""

    def __init__(self) -> None:
        self.states: list[StepState] = []

    def decide_step(self, state: StepState) -> StepDecision:
        self.states.append(state)
        newest = sorted(state.prefilling, key=lambda view: -view.arrival)
        late = [view.key for view in state.decoding if view.output_tokens >= 3]
        return StepDecision(
            prefill_order=tuple(view.key for view in newest),
            prefill_tokens=2,
            variants=dict.fromkeys(late, Variant.INT4),
        )


def test_a_step_policy_decides(make_bench: MakeBench) -> None:
    """The policy's order, chunk and variants are what runs, and it sees how each sequence stands."""
    policy = _Scripted()
    bench = make_bench(policy=policy)
    bench.submit("old", [1, 2, 3], bench.plan(5))
    bench.submit("new", [4, 5, 6], bench.plan(5))
    bench.run()
    assert next(iter(bench.out.chunks)) == "new"
    assert [len(slices[0].token_ids) for _, slices in bench.runner.passes][:2] == [2, 1]
    assert [variant for variant, _ in bench.runner.passes][-1] is Variant.INT4
    assert bench.out.finish("new").timeline.events[0].name == "variant_changed"
    view = next(view for view in policy.states[2].decoding if view.key.request_id == "new")
    assert view.key == SequenceKey(request_id="new", index=0)
    assert (view.computed_tokens, view.remaining_tokens, view.output_tokens) == (3, 1, 1)
    assert view.first_token_at_s == view.last_token_at_s is not None


def test_a_policy_sees_what_the_last_step_took(make_bench: MakeBench) -> None:
    """Each pass of the step before is shown to the policy with its load and its duration."""
    policy = _Scripted()
    bench = make_bench(policy=policy)
    bench.runner.before_pass = lambda slices: setattr(bench.clock, "now_s", bench.clock.now_s + 0.5)
    bench.submit("a", [1, 2, 3], bench.plan(3))
    bench.run()
    assert policy.states[0].previous == ()
    shown = [
        (step.variant, step.prefill_tokens, step.decode_tokens, round(step.ended_at_s - step.started_at_s, 1))
        for state in policy.states[1:]
        for step in state.previous
    ]
    assert shown == [("bf16", 2, 0, 0.5), ("bf16", 1, 0, 0.5), ("bf16", 0, 1, 0.5)]


def test_the_callers_choice_of_a_variant_stands(make_bench: MakeBench) -> None:
    """A stream that its caller moved is moved no further by the policy, and each move says why."""
    policy = _Scripted()
    bench = make_bench(policy=policy)
    bench.submit("held", [1, 2, 3], bench.plan(8))
    bench.submit("free", [4, 5, 6], bench.plan(8))
    bench.step(4)
    bench.engine.change_variant("held", Variant.BF16)
    out = bench.run()
    assert out.finish("held").timeline.events == ()
    (event,) = out.finish("free").timeline.events
    assert event.attributes == {"from": "bf16", "to": "int4", "why": "the step policy"}
    held = [view for state in policy.states for view in state.decoding if view.key.request_id == "held"]
    assert held[-1].variant_held
    free = [view for state in policy.states for view in state.decoding if view.key.request_id == "free"]
    assert (free[-1].variant_changes, free[-1].variant_since_tokens) == (1, 3)


class _Silent:
    def decide_step(self, state: StepState) -> StepDecision:
        return StepDecision(prefill_order=(), prefill_tokens=0)


def test_a_policy_that_forgets_prompts_stalls_nothing(make_bench: MakeBench) -> None:
    """Where nothing decodes, something is prefilled, whatever the policy says."""
    bench = make_bench(policy=_Silent())
    bench.submit("a", [1, 2, 3])
    bench.submit("b", [1, 2, 3])
    out = bench.run()
    assert len(out.ids("a")) == len(out.ids("b")) == 8


def test_a_large_prompt_is_not_starved_by_small_ones(make_bench: MakeBench) -> None:
    """What stands behind a prompt that has to wait for blocks waits too."""
    bench = make_bench(n_blocks=10)
    bench.submit("running", [1] * 12, bench.plan(9))
    bench.step()
    bench.submit("large", [2] * 30, bench.plan(2))
    for i in range(6):
        bench.submit(f"small{i}", [3 + i], bench.plan(2))
    bench.run()
    order = list(bench.out.chunks)
    assert order.index("large") < order.index("small0")
