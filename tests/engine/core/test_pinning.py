from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from paceline_engine.core import EngineConfig
from paceline_engine.errors import InvalidValueError
from paceline_engine.mode import Variant

MakeBench = Callable[..., Any]
GreedyIds = Callable[[Sequence[int], int], list[int]]
PROMPT = list(range(12))


def warmed(make_bench: MakeBench, **options: Any) -> Any:
    bench = make_bench(**options)
    bench.submit("warm", PROMPT, bench.plan(1))
    bench.run()
    return bench


def traffic(bench: Any, n: int = 6) -> None:
    for i in range(n):
        bench.submit(f"t{bench.clock.now_s}-{i}", [20 + i] * 20, bench.plan(4))
    bench.run()


def test_a_pinned_prompt_is_served_after_other_traffic(make_bench: MakeBench) -> None:
    """Traffic that fills the cache many times over leaves a pinned prompt, and takes an unpinned one."""
    for pinned in (True, False):
        bench = warmed(make_bench, n_blocks=12)
        if pinned:
            assert bench.engine.pin("tool", PROMPT, hold_s=60.0) == 12
        traffic(bench)
        bench.submit("next", [*PROMPT, 40], bench.plan(1))
        assert bench.run().finish("next").usage.cached_tokens == (12 if pinned else 0)


def test_an_expired_pin_holds_nothing(make_bench: MakeBench) -> None:
    """Once its time has passed a pin's blocks are free again, without any step."""
    bench = warmed(make_bench, n_blocks=12)
    bench.engine.pin("tool", PROMPT, hold_s=5.0)
    assert bench.engine.snapshot(()).pinned_blocks == 3
    assert bench.free == 9
    bench.clock.now_s += 5.1
    assert bench.engine.snapshot(()).pinned_blocks == 0
    assert bench.free == 12


def test_pins_yield_rather_than_stand_in_the_way(make_bench: MakeBench, greedy_ids: GreedyIds) -> None:
    """A prompt that fits only without the pinned blocks waits for what runs, and then runs."""
    bench = warmed(make_bench, n_blocks=12)
    bench.engine.pin("tool", PROMPT, hold_s=1e6)
    large = [50] * 44
    bench.submit("large", large, bench.plan(3))
    out = bench.run(most=200)
    assert out.ids("large") == greedy_ids(large, 3)
    assert bench.engine.snapshot(()).pinned_blocks == 0
    assert bench.free == 12


def test_a_stream_that_grows_takes_a_pin_before_it_gives_itself_up(
    make_bench: MakeBench, greedy_ids: GreedyIds
) -> None:
    """Where a single stream needs a block and pins hold the rest, a pin ends and nothing is preempted."""
    bench = warmed(make_bench, n_blocks=8)
    bench.engine.pin("tool", PROMPT, hold_s=1e6)
    bench.submit("grows", [9, 9, 9], bench.plan(26))
    out = bench.run(most=200)
    assert out.ids("grows") == greedy_ids([9, 9, 9], 26)
    assert all(event.name != "preempted" for event in out.finish("grows").timeline.events)


def test_pins_keep_to_their_share(make_bench: MakeBench) -> None:
    """The configured share bounds what is pinned; a share that is none is refused."""
    bench = warmed(make_bench, n_blocks=12, max_pinned_share=0.2)
    assert bench.engine.pin("tool", PROMPT, hold_s=60.0) == 8
    with pytest.raises(InvalidValueError, match="max_pinned_share"):
        EngineConfig(max_pinned_share=1.5)


def test_salts_pin_apart(make_bench: MakeBench) -> None:
    """A pin holds only what its own salt has cached."""
    bench = warmed(make_bench)
    assert bench.engine.pin("tool", PROMPT, hold_s=60.0, salt="other") == 0


def test_mixing_is_the_callers_choice(make_bench: MakeBench) -> None:
    """KV of a lower variant serves a higher one only where the plan allows it, and the result counts low."""
    bench = make_bench()
    bench.submit("low", PROMPT, bench.plan(1, Variant.INT4))
    bench.run()
    look = bench.engine.snapshot(PROMPT)
    assert (look.cached_tokens[Variant.BF16], look.cached_mixed_tokens) == (0, 8)
    bench.submit("strict", PROMPT, bench.plan(1))
    bench.submit("other", [*PROMPT, 13], bench.plan(1, Variant.INT4))
    bench.run()
    assert bench.out.finish("strict").usage.cached_tokens == 0

    mixing = make_bench()
    mixing.submit("low", PROMPT, mixing.plan(1, Variant.INT4))
    mixing.run()
    mixing.submit("mixed", [*PROMPT, 13, 14, 15, 16, 17], mixing.plan(1, mix_cache=True))
    mixing.run()
    assert mixing.out.finish("mixed").usage.cached_tokens == 12
    # What bf16 computed on top of int4's KV serves no strict bf16 request.
    assert mixing.engine.snapshot([*PROMPT, 13, 14, 15, 16, 17]).cached_tokens[Variant.BF16] == 0
