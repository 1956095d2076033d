from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from paceline_engine.cache.blocks import BlockPool
from paceline_engine.errors import UnknownOptionError
from paceline_engine.mode import Variant
from paceline_engine.request import SamplingParams

MakeBench = Callable[..., Any]
GreedyIds = Callable[[Sequence[int], int], list[int]]


@pytest.mark.parametrize(("n_prompt", "n_cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_a_second_run_reuses_full_blocks(
    make_bench: MakeBench, greedy_ids: GreedyIds, n_prompt: int, n_cached: int
) -> None:
    """The same prompt again runs only its last token's block, and gives the same output."""
    prompt = list(range(n_prompt))
    bench = make_bench()
    bench.submit("a", prompt, bench.plan(1))
    bench.run()
    snapshot = bench.engine.snapshot(prompt)
    assert dict(snapshot.cached_tokens) == {Variant.BF16: n_cached, Variant.INT4: n_cached}
    bench.submit("b", prompt)
    out = bench.run()
    assert out.ids("b") == greedy_ids(prompt, 8)
    assert out.finish("a").usage.cached_tokens == 0
    assert out.finish("b").usage.cached_tokens == n_cached
    assert out.finish("b").timeline.cached_tokens == n_cached
    assert bench.free == 32


def test_output_is_cached_too(make_bench: MakeBench, greedy_ids: GreedyIds) -> None:
    """A conversation that goes on finds the blocks of its own answer."""
    bench = make_bench()
    bench.submit("a", [1, 2, 3], bench.plan(10))
    answer = bench.run().ids("a")
    bench.submit("b", [1, 2, 3, *answer, 9])
    out = bench.run()
    assert out.finish("b").usage.cached_tokens == 12
    assert out.ids("b") == greedy_ids([1, 2, 3, *answer, 9], 8)


def test_concurrent_continuations_of_a_partial_block(make_bench: MakeBench, greedy_ids: GreedyIds) -> None:
    """Two prompts that differ inside the second block share the first, and each equals its solo run."""
    bench = make_bench()
    bench.submit("warm", [1, 2, 3, 4, 5, 6], bench.plan(1))
    bench.run()
    bench.submit("a", [1, 2, 3, 4, 5, 6, 7])
    bench.submit("b", [1, 2, 3, 4, 5, 6, 8])
    bench.submit("same", [1, 2, 3, 4, 5, 6, 7])
    out = bench.run()
    assert out.ids("a") == out.ids("same") == greedy_ids([1, 2, 3, 4, 5, 6, 7], 8)
    assert out.ids("b") == greedy_ids([1, 2, 3, 4, 5, 6, 8], 8)
    assert bench.free == 32


def test_salts_share_nothing(make_bench: MakeBench) -> None:
    """A prefix serves only requests of its own salt, in requests and in snapshots."""
    bench = make_bench()
    prompt = list(range(9))
    for name, salt in (("a1", "a"), ("a2", "a"), ("b", "b"), ("none", "")):
        bench.submit(name, prompt, salt=salt)
        bench.run()
    cached = [bench.out.finish(name).usage.cached_tokens for name in ("a1", "a2", "b", "none")]
    assert cached == [0, 8, 0, 0]
    assert bench.engine.snapshot(prompt, salt="a").cached_tokens[Variant.BF16] == 8
    assert bench.engine.snapshot(prompt, salt="c").cached_tokens[Variant.BF16] == 0
    with pytest.raises(UnknownOptionError, match="adapter"):
        bench.engine.snapshot(prompt, salt="a", adapter="x")


def test_colliding_hashes_give_right_output(make_bench: MakeBench, greedy_ids: GreedyIds) -> None:
    """With a hash that is the same for everything, tokens and salts still decide what is shared."""
    bench = make_bench(n_blocks=64)
    pool = BlockPool(64, 4, hash_key=lambda content: 7)
    bench.engine._pool = bench.engine._scheduler.pool = pool
    prompts = [list(range(9)), list(range(1, 10)), [0, 1, 2, 3, 9, 9, 9, 9, 9], list(range(9))]
    for i, prompt in enumerate(prompts):
        bench.submit(str(i), prompt, salt="x" if i == 3 else "")
    bench.run()
    for i, prompt in enumerate(prompts):
        bench.submit(f"again{i}", prompt, salt="x" if i == 3 else "")
    out = bench.run()
    for i, prompt in enumerate(prompts):
        assert out.ids(str(i)) == out.ids(f"again{i}") == greedy_ids(prompt, 8)
        assert out.finish(f"again{i}").usage.cached_tokens == 8


def test_without_the_prefix_cache(make_bench: MakeBench) -> None:
    """A mode without the prefix cache neither reads it nor writes to it."""
    bench = make_bench()
    prompt = list(range(9))
    bench.submit("a", prompt, bench.plan(prefix_cache=False))
    bench.run()
    assert bench.engine.snapshot(prompt).cached_tokens[Variant.BF16] == 0
    bench.submit("b", prompt)
    bench.run()
    bench.submit("c", prompt, bench.plan(prefix_cache=False))
    out = bench.run()
    assert [out.finish(name).usage.cached_tokens for name in "abc"] == [0, 0, 0]


def test_lower_quality_serves_no_higher_demand(make_bench: MakeBench) -> None:
    """KV that int4 wrote, or that bf16 computed on top of it, never serves bf16; the reverse may be."""
    bench = make_bench()
    bench.runner.variants_differ = True
    prompt = list(range(9))
    bench.submit("low", prompt, bench.plan(variant=Variant.INT4))
    bench.run()
    assert dict(bench.engine.snapshot(prompt).cached_tokens) == {Variant.BF16: 0, Variant.INT4: 8}
    bench.submit("high", prompt)
    bench.run()
    bench.submit("low again", prompt, bench.plan(variant=Variant.INT4))
    bench.run()
    bench.submit("high again", prompt)
    out = bench.run()
    names = ("low", "high", "low again", "high again")
    assert [out.finish(name).usage.cached_tokens for name in names] == [0, 0, 8, 8]
    assert out.ids("low") == out.ids("low again")
    assert out.ids("high") == out.ids("high again") != out.ids("low")


def test_blocks_after_a_change_of_variant_count_as_the_lower(make_bench: MakeBench) -> None:
    """A stream that went int4 and back to bf16 leaves no block after the change to bf16 requests."""
    bench = make_bench()
    bench.submit("a", [1, 2, 3, 4, 5], bench.plan(16))
    bench.step(5)
    bench.engine.change_variant("a", Variant.INT4)
    bench.step(1)
    bench.engine.change_variant("a", Variant.BF16)
    ids = bench.run().ids("a")
    cached = bench.engine.snapshot([1, 2, 3, 4, 5, *ids]).cached_tokens
    assert dict(cached) == {Variant.BF16: 8, Variant.INT4: 20}


def test_eviction_never_takes_what_is_held(make_bench: MakeBench, greedy_ids: GreedyIds) -> None:
    """Many prompts through a small pool evict one another's blocks, and every output stays right."""
    bench = make_bench(n_blocks=10)
    for i in range(30):
        bench.submit(str(i), [i % 5, 1, 2, 3, 4, 5, i % 3, 7], bench.plan(6))
    out = bench.run()
    for i in range(30):
        assert out.ids(str(i)) == greedy_ids([i % 5, 1, 2, 3, 4, 5, i % 3, 7], 6)
    assert bench.free == 10


def test_sampled_output_is_the_same_from_the_cache(make_bench: MakeBench) -> None:
    """A seeded stream draws the same tokens from a cold and from a warm cache."""
    bench = make_bench()
    sampling = SamplingParams(temperature=1.0, seed=1, repetition_penalty=1.3)
    for name in ("cold", "warm"):
        bench.submit(name, list(range(10)), sampling=sampling)
        bench.run()
    assert bench.out.ids("cold") == bench.out.ids("warm")
