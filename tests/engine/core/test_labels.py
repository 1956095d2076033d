"""Whose KV a block holds: its label is never better than what it was computed from."""

from __future__ import annotations

import random
from typing import Any

import pytest

from paceline_engine.cache.quality import worst
from paceline_engine.errors import PacelineError
from paceline_engine.mode import Drafter, Speculation, Variant

Bench = Any
N_REQUESTS = 700
DRAFTS = (
    None,
    Speculation(drafter=Drafter.NGRAM, max_draft_tokens=4),
    Speculation(drafter=Drafter.SELF, max_draft_tokens=4, draft_variant=Variant.INT4),
)


def better(one: Variant, other: Variant) -> bool:
    return one is not other and worst((one, other)) is other


def check_blocks(bench: Bench) -> int:
    """Each block that the cache knows holds its tokens, as good as its label; gives their number."""
    pool, size = bench.engine._pool, bench.runner.block_size
    for block, published in pool._published.items():
        words = bench.runner.kv[block]
        assert tuple(int(word.partition(":")[2]) for word in words) == published.node.content
        for place in range(size):
            assert not better(published.variant, bench.runner.writer(block, place)), (block, words)
    return len(pool._published)


def check_streams(bench: Bench, pure: dict[str, Variant]) -> None:
    """A stream that allowed no mixing, and was never moved, reads nothing below its own quality."""
    size = bench.runner.block_size
    for sequence in bench.engine._scheduler.sequences:
        for place in range(sequence.n_computed):
            writer = bench.runner.writer(sequence.blocks[place // size], place % size)
            assert not better(sequence.kv_quality, writer)
            variant = pure.get(sequence.key.request_id)
            assert variant is None or not better(variant, writer), (sequence.key, place)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_labels_survive_all_that_happens_to_blocks(taint_bench: Bench, seed: int) -> None:
    """Preemption, moves, drafts, branches, pins and their ends, eviction and re-use, at random."""
    bench, rng = taint_bench, random.Random(seed)
    pure: dict[str, Variant] = {}
    n_published = 0
    prefixes = [[rng.randrange(60) for _ in range(length)] for length in (4, 9, 16, 23)]

    def step() -> None:
        nonlocal n_published
        bench.step()
        check_streams(bench, pure)
        n_published = max(n_published, check_blocks(bench))

    for number in range(N_REQUESTS):
        name, variant, mix = str(number), rng.choice(bench.runner.variants), rng.random() < 0.3
        prompt = [*rng.choice(prefixes), *(rng.randrange(60) for _ in range(rng.randint(0, 6)))]
        plan = bench.plan(
            rng.randint(1, 14),
            variant,
            mix_cache=mix,
            prefix_cache=rng.random() < 0.9,
            speculation=rng.choice(DRAFTS),
            deadline_at_s=rng.choice([None, bench.clock.now_s + 0.05]),
        )
        if not mix:
            pure[name] = variant
        salt, session = rng.choice(["", "", "t"]), rng.choice(["", "s"])
        try:
            bench.submit(name, prompt, plan, n=rng.choice([1, 1, 3]), salt=salt, session=session)
        except PacelineError as error:
            pytest.fail(str(error))
        if rng.random() < 0.3:
            target = str(number - rng.randint(0, 5))
            pure.pop(target, None)
            bench.engine.change_variant(target, rng.choice(bench.runner.variants))
        if rng.random() < 0.2:
            bench.engine.pin(rng.choice("ab"), prompt, hold_s=rng.choice([0.01, 5.0]), salt=salt)
        if rng.random() < 0.1:
            bench.engine.abort(str(number - rng.randint(0, 5)))
        while len(bench.engine._ledger.requests) > 10 or rng.random() < 0.4:
            step()
    while bench.engine.has_work:
        step()
    for pin in "ab":
        bench.engine.unpin(pin)
    assert n_published > 12
    events = [
        event.name
        for chunks in bench.out.chunks.values()
        for chunk in chunks
        if chunk.finish is not None
        for event in chunk.finish.timeline.events
    ]
    assert events.count("preempted") > 10
    assert events.count("variant_changed") > 50
    assert bench.free == bench.runner.n_blocks
