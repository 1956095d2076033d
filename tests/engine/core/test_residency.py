"""Variants that are loaded beside the steps: who waits, who goes on, and what a failure ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline_engine.errors import BackendError, ModelLoadError
from paceline_engine.mode import Drafter, Speculation, Variant
from paceline_engine.schedule.base import SequenceKey, StepDecision, StepState
from paceline_engine.timeline import VARIANT_CHANGED, VARIANT_LOADED

Bench = Any


@pytest.fixture
def bench(late_bench: Bench) -> Bench:
    return late_bench


def land(bench: Bench) -> None:
    """Let the load that is under way end."""
    bench.runner.let.release()
    bench.runner.settle()


def events(bench: Bench, name: str) -> list[tuple[str, dict[str, object]]]:
    return [(event.name, event.attributes) for event in bench.out.finish(name).timeline.events]


def test_streams_go_on_while_a_variant_loads(
    bench: Bench, greedy_ids: Callable[[list[int], int], list[int]]
) -> None:
    """Each step gives the running stream its token; the one that waits holds no block and then runs."""
    bench.submit("a", [1, 2, 3], bench.plan(12))
    bench.step(2)
    bench.submit("b", [4, 5, 6], bench.plan(4, Variant.INT4))
    for n_tokens in range(3, 8):
        bench.step()
        assert len(bench.out.ids("a")) == n_tokens
    assert bench.runner.n_blocks - bench.free == 3, "only the running stream holds blocks"
    assert bench.out.ids("b") == []
    assert bench.engine.snapshot(()).waiting == 1
    land(bench)
    bench.run()
    assert bench.out.ids("a") == greedy_ids([1, 2, 3], 12)
    assert bench.out.ids("b") == greedy_ids([4, 5, 6], 4)
    ((name, facts),) = events(bench, "b")
    assert (name, facts["variant"]) == (VARIANT_LOADED, "int4")
    assert isinstance(facts["took_ms"], float)
    assert events(bench, "a") == []


@pytest.mark.parametrize("error", [ModelLoadError("m", reason="torn", remedy="fetch"), MemoryError("full")])
def test_a_load_that_fails_ends_only_who_waits_for_it(bench: Bench, error: Exception) -> None:
    """The others go on, every block is free in the end, and the next request loads it after all."""
    free = bench.free
    bench.runner.error = error
    bench.submit("a", [1, 2, 3], bench.plan(8))
    bench.submit("b", [4, 5, 6], bench.plan(4, Variant.INT4))
    bench.submit("c", [7, 8], bench.plan(4, Variant.INT4), n=2)
    bench.score("d", [7, 8], ["AB", "C"], bench.plan(1, Variant.INT4))
    bench.submit("e", [4, 5, 6], bench.plan(4, "int4"))  # a plain text names it as well
    bench.step(2)
    land(bench)
    bench.run()
    assert set(bench.out.errors) == {"b", "c", "d", "e"}
    assert all(isinstance(each, type(error) | BackendError) for each in bench.out.errors.values())
    assert str(error).split(":")[-1].strip() in str(bench.out.errors["b"])
    assert len(bench.out.ids("a")) == 8
    bench.engine._pool.evict_cached()
    assert bench.free == free
    bench.runner.error = None
    bench.submit("e", [4, 5, 6], bench.plan(4, Variant.INT4))
    land(bench)
    bench.run()
    assert len(bench.out.ids("e")) == 4


def test_a_move_to_a_variant_that_loads_comes_when_it_is_there(bench: Bench) -> None:
    """Until then the stream goes on as it was; what moved it stands in its timeline after the load."""
    bench.submit("a", [1, 2, 3], bench.plan(10))
    bench.step(2)
    bench.engine.change_variant("a", Variant.INT4)
    bench.step(3)
    assert {variant for variant, _ in bench.runner.passes} == {Variant.BF16}
    land(bench)
    bench.step()
    assert bench.runner.passes[-1][0] is Variant.INT4
    bench.run()
    assert [name for name, _ in events(bench, "a")] == [VARIANT_LOADED, VARIANT_CHANGED]


def test_a_move_whose_load_fails_leaves_the_stream_as_it_is(bench: Bench) -> None:
    """It says so in the timeline, and ends as planned."""
    bench.runner.error = OSError("no such file")
    bench.submit("a", [1, 2, 3], bench.plan(8))
    bench.step(2)
    bench.engine.change_variant("a", Variant.INT4)
    land(bench)
    bench.run()
    ((name, facts),) = events(bench, "a")
    assert name == "variant_unavailable"
    assert "no such file" in str(facts["error"])
    assert len(bench.out.ids("a")) == 8


def test_the_latest_of_two_moves_counts(bench: Bench) -> None:
    """A caller who moves a stream back before the load has ended keeps it where it was."""
    bench.submit("a", [1, 2, 3], bench.plan(10))
    bench.step(2)
    bench.engine.change_variant("a", Variant.INT4)
    bench.engine.change_variant("a", Variant.BF16)
    land(bench)
    bench.run()
    assert {variant for variant, _ in bench.runner.passes} == {Variant.BF16}


def test_a_step_policy_moves_a_stream_once_the_variant_is_there(bench: Bench) -> None:
    """Its wish starts the load, and is carried out after it; failing loads are not tried at every step."""

    class Mover:
        def decide_step(self, state: StepState) -> StepDecision:
            keys = tuple(view.key for view in state.prefilling)
            moves = {view.key: Variant.INT4 for view in state.decoding}
            return StepDecision(prefill_order=keys, prefill_tokens=64, variants=moves)

    bench.engine._scheduler.policy = Mover()
    bench.runner.error = OSError("not yet")
    bench.submit("a", [1, 2, 3], bench.plan(20))
    bench.step(3)
    land(bench)
    bench.step(3)
    assert bench.runner.order == [Variant.INT4]
    bench.runner.error = None
    bench.clock.now_s += 60
    bench.step()
    land(bench)
    bench.step()
    assert bench.runner.passes[-1][0] is Variant.INT4
    bench.run()


def test_what_a_stream_waits_for_loads_before_what_it_may_need(bench: Bench) -> None:
    """The plan's own variant first, then the one that drafts and those that it may be moved to."""
    speculation = Speculation(drafter=Drafter.SELF, max_draft_tokens=2, draft_variant=Variant.INT4)
    plan = bench.plan(4, Variant.INT8, speculation=speculation, fallback_variants=(Variant.FP8,))
    bench.submit("a", [1, 2, 3], plan)
    bench.submit("b", [1, 2, 3], bench.plan(4, Variant.FP32))
    for _ in range(4):
        bench.runner.let.release()
    bench.runner.settle()
    assert bench.runner.order == [Variant.INT8, Variant.FP32, Variant.INT4, Variant.FP8]
    bench.run()
    assert bench.out.ids("a") == bench.out.ids("b")


def test_nothing_is_drafted_with_a_variant_that_is_not_there(bench: Bench) -> None:
    """The stream decodes without drafts until its drafter is loaded, and drafts from then on."""
    bench.engine._speculator._adapt = False
    speculation = Speculation(drafter=Drafter.SELF, max_draft_tokens=2, draft_variant=Variant.INT4)
    bench.submit("a", [1, 2, 3], bench.plan(12, speculation=speculation))
    bench.step(4)
    assert len(bench.out.ids("a")) == 4
    land(bench)
    bench.run()
    assert bench.out.finish("a").timeline.drafted_tokens > 0


def test_leaving_while_a_variant_loads_frees_all(bench: Bench) -> None:
    """An abort and a hard deadline end a request that waits for a load; the load harms nobody."""
    free = bench.free
    bench.submit("a", [1, 2, 3], bench.plan(4, Variant.INT4))
    due = bench.plan(4, Variant.INT4, deadline_at_s=bench.clock.now_s + 1, hard_deadline=True)
    bench.submit("b", [1, 2, 3], due)
    bench.step()
    bench.engine.abort("a")
    bench.clock.now_s += 2
    bench.run()
    assert bench.out.finish("a").reason == "cancelled"
    assert "b" in bench.out.errors
    assert bench.free == free
    land(bench)
    assert bench.engine._ledger._moves == {}


def test_a_snapshot_tells_how_long_a_load_will_take(bench: Bench) -> None:
    """At first as assumed, then as the last load went; nothing for what is there."""
    assert bench.engine.snapshot(()).loading_s[Variant.INT4] == pytest.approx(1.0)
    assert Variant.BF16 not in bench.engine.snapshot(()).loading_s
    bench.submit("a", [1, 2, 3], bench.plan(2, Variant.INT4))
    bench.clock.now_s += 0.5
    waits = bench.engine.snapshot(()).loading_s
    assert waits[Variant.INT4] == pytest.approx(0.5, abs=0.1)
    assert waits[Variant.INT8] == pytest.approx(1.5, abs=0.1)
    bench.clock.now_s += 1.5
    land(bench)
    bench.run()
    waits = bench.engine.snapshot(()).loading_s
    assert Variant.INT4 not in waits
    assert waits[Variant.INT8] == pytest.approx(2.0, abs=0.1)


def test_a_policy_with_a_key_of_a_waiting_stream_cannot_run_it(bench: Bench) -> None:
    """Only what is in memory is shown to the step policy."""
    seen: list[SequenceKey] = []

    class Watcher:
        def decide_step(self, state: StepState) -> StepDecision:
            seen.extend(view.key for view in (*state.prefilling, *state.decoding))
            return StepDecision(prefill_order=(), prefill_tokens=64)

    bench.engine._scheduler.policy = Watcher()
    bench.submit("a", [1, 2, 3], bench.plan(2, Variant.INT4))
    bench.step(3)
    assert seen == []
    land(bench)
    bench.run()
    assert {key.request_id for key in seen} == {"a"}
