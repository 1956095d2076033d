"""What the prefix cache holds, in every mode: the KV of the variant that it names, and of no draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline_engine.cache.prefix import CacheScope
from paceline_engine.cache.quality import serves, worst
from paceline_engine.mode import Variant

OpenCase = Callable[..., Any]
Solo = Callable[..., Any]

PROMPT = [65, 66, 67, 68, 69, 70, 71]


def cached_kv(bench: Any, token_ids: Sequence[int]) -> dict[tuple[Variant, int], torch.Tensor]:
    """Keys and values of each cached block of a text, [2, layers, block size, heads, head_dim], by writer and
    place."""
    nodes = bench.engine._pool._index.walk(token_ids, CacheScope(model=""))
    kv = bench.runner.kv
    return {
        (variant, place): torch.stack([cache[:, block] for cache in (kv.keys, kv.values)])
        for place, node in enumerate(nodes)
        for variant, block in node.blocks.items()
    }


def test_the_cache_holds_what_its_variant_computes(
    case: Any, open_case: OpenCase, known: dict[Any, Any]
) -> None:
    """After drafts, preemption and other streams the cached blocks hold the KV that a plain run computes, and
    under the name of the lowest variant that a stream was run with."""
    if ("kv", case.plain) not in known:
        plain = open_case(case.plain)
        plain.submit("a", PROMPT, plain.plan(14, prefix_cache=True), ignore_eos=True)
        ids = [*PROMPT, *plain.run().ids("a")]
        known["kv", case.plain] = ids, cached_kv(plain, ids)
    ids, expected = known["kv", case.plain]
    places = range((len(ids) - 1) // 4)
    assert list(expected) == [(case.variant, place) for place in places]
    bench = open_case(case)
    for name, prompt in (("b", [90, 91]), ("a", PROMPT), ("c", PROMPT[:5])):
        bench.submit(name, prompt, bench.plan(14), ignore_eos=True)
    assert [*PROMPT, *bench.run().ids("a")] == ids
    found = cached_kv(bench, ids)
    if not case.cached:
        assert not found
    elif case.policy != "moving":
        assert {variant for variant, _ in found} == {case.variant}
    if case.cached and not case.crowded:
        assert {place for _, place in found} == set(places)
        steps = bench.out.finish("a").timeline.steps
        lowest = worst(step.variant for step in steps if not step.drafting)
        assert {variant for variant, place in found if place == places[-1]} == {lowest}
    for (_, place), kv in found.items():
        torch.testing.assert_close(kv, expected[case.variant, place], atol=2e-3, rtol=1e-3)


def test_blocks_serve_equal_or_lower_demands(case: Any, open_case: OpenCase, solo: Solo) -> None:
    """Of a text that one mode wrote each variant reads as much as its quality allows, all of it where the
    caller allows mixing; and what reads its own variant's KV goes on as a cold run would."""
    bench = open_case(case)
    bench.submit("a", PROMPT, bench.plan(10, fallback_variants=()), ignore_eos=True)
    ids = [*PROMPT, *bench.run().ids("a"), 65]
    n_full = (len(ids) - 2) // 4 * 4
    snapshot = bench.engine.snapshot(ids)
    for variant, n_cached in snapshot.cached_tokens.items():
        assert n_cached == (n_full if case.cached and serves(case.variant, variant) else 0)
    bench.submit("again", ids, bench.plan(4, fallback_variants=()), ignore_eos=True)
    bench.run()
    assert [bench.outcome("again")] == solo(case, ids, 4, ignore_eos=True)
    assert bench.out.finish("again").usage.cached_tokens == (n_full if case.cached else 0)
    for mix in (False, True):
        better = bench.plan(1, Variant.FP32, mix_cache=mix, speculation=None, fallback_variants=())
        bench.submit(f"better {mix}", [*ids, 66], better, ignore_eos=True)
        n_cached = bench.run().finish(f"better {mix}").usage.cached_tokens
        allowed = case.cached and (mix or case.variant is Variant.FP32)
        assert (n_cached > 0) == allowed
