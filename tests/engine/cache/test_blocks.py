from __future__ import annotations

import random

import pytest

from paceline_engine.cache.blocks import BlockPool
from paceline_engine.cache.prefix import CacheScope, PrefixNode
from paceline_engine.cache.quality import BEST_FIRST, serves, worst
from paceline_engine.mode import Variant

SCOPE = CacheScope(model="m")
BF16, INT4 = Variant.BF16, Variant.INT4


def fill(
    pool: BlockPool, token_ids: list[int], scope: CacheScope = SCOPE, variant: Variant = BF16
) -> list[int]:
    """Compute ``token_ids`` as a sequence would: reuse, allocate, publish; the blocks stay held."""
    match = pool.match([*token_ids, 0], scope, variant)
    pool.retain(match.blocks)
    n_full = len(token_ids) // pool.block_size
    blocks = [*match.blocks, *pool.allocate(n_full - len(match.blocks))]
    parent: PrefixNode | CacheScope = match.node or scope
    for i in range(len(match.blocks), n_full):
        tokens = token_ids[i * pool.block_size : (i + 1) * pool.block_size]
        parent, blocks[i] = pool.publish(parent, blocks[i], tokens, variant)
    return blocks


def cached(pool: BlockPool, token_ids: list[int], scope: CacheScope = SCOPE, variant: Variant = BF16) -> int:
    return pool.cached_tokens(token_ids, scope, (variant,))[variant]


def test_release_makes_blocks_cached_and_free() -> None:
    """Released full blocks count as free and are still found; reference counts are back at 0."""
    pool = BlockPool(4, 2)
    blocks = fill(pool, [1, 2, 3, 4])
    assert pool.n_free == 2
    pool.release(blocks)
    assert pool.n_free == 4
    assert [pool.references(block) for block in range(4)] == [0] * 4
    assert pool.match([1, 2, 3, 4, 5], SCOPE, BF16).blocks == tuple(blocks)


def test_the_last_token_is_never_served() -> None:
    """A prompt of an exact multiple of the block leaves its last block to be computed."""
    pool = BlockPool(4, 2)
    pool.release(fill(pool, [1, 2, 3, 4]))
    assert len(pool.match([1, 2, 3, 4], SCOPE, BF16).blocks) == 1
    assert pool.match([1, 2], SCOPE, BF16).blocks == ()
    assert cached(pool, [1, 2, 3, 4]) == 2


def test_nothing_is_usable_after_a_hole() -> None:
    """When the first of three blocks is gone, none of the others is served."""
    pool = BlockPool(3, 1)
    first = fill(pool, [1])
    rest = fill(pool, [1, 2, 3])[1:]
    pool.release(first)
    pool.release([first[0]])
    assert cached(pool, [1, 2, 3, 4]) == 3
    pool.release(rest)
    # A pool under pressure takes leaves first; the root is the last to go.
    assert pool.allocate(1) == [rest[1]]
    assert cached(pool, [1, 2, 3, 4]) == 2
    assert pool.allocate(1) == [rest[0]]
    assert pool.allocate(1) == first
    assert cached(pool, [1, 2, 3, 4]) == 0
    assert len(pool._index) == 0


def test_evicting_one_variant_leaves_the_other_whole() -> None:
    """When the int4 block of a prefix goes, the bf16 one beside it and its child are still served."""
    pool = BlockPool(4, 1)
    low = fill(pool, [1], variant=INT4)
    blocks = fill(pool, [1, 2])
    assert blocks[0] not in low
    pool.release(low)
    assert pool.match([1, 2, 3], SCOPE, INT4).blocks == (low[0], blocks[1])
    pool.allocate(pool.n_free)  # takes the int4 block of the first token
    assert pool.match([1, 2, 3], SCOPE, INT4).blocks == tuple(blocks)
    assert cached(pool, [1, 2, 3]) == 2
    pool.release(blocks)
    pool.evict_cached()
    assert cached(pool, [1, 2, 3]) == 0


def test_a_recycled_block_is_forgotten() -> None:
    """A block given to other work is not found under its old tokens."""
    pool = BlockPool(1, 2)
    pool.release(fill(pool, [1, 2]))
    (block,) = fill(pool, [3, 4])
    assert cached(pool, [1, 2, 0]) == 0
    assert pool.match([3, 4, 0], SCOPE, BF16).blocks == (block,)


def test_equal_blocks_become_one() -> None:
    """When two sequences compute the same tokens, the second gives its block back and shares the first."""
    pool = BlockPool(4, 2)
    (first,) = fill(pool, [1, 2])
    (own,) = pool.allocate(1)
    _, held = pool.publish(SCOPE, own, [1, 2], BF16)
    assert held == first
    assert pool.references(first) == 2
    assert pool.references(own) == 0
    assert pool.n_free == 3


@pytest.mark.parametrize(
    "other",
    [
        CacheScope(model="n"),
        CacheScope(model="m", adapter="a"),
        CacheScope(model="m", salt="a"),
        CacheScope(model="m", adapter="a reloaded"),
    ],
)
@pytest.mark.parametrize("collide", [False, True])
def test_scopes_share_nothing(other: CacheScope, collide: bool) -> None:
    """Another model, adapter, adapter's weights or salt misses, even when every hash collides."""
    pool = BlockPool(8, 2, hash_key=(lambda content: 0) if collide else hash)
    pool.release(fill(pool, [1, 2, 3, 4]))
    assert cached(pool, [1, 2, 3, 4, 5]) == 4
    assert cached(pool, [1, 2, 3, 4, 5], other) == 0
    pool.release(fill(pool, [1, 2, 3, 4], other))
    assert cached(pool, [1, 2, 3, 4, 5], other) == 4
    assert pool.match([1, 2, 0], SCOPE, BF16).blocks != pool.match([1, 2, 0], other, BF16).blocks


def test_swapped_blocks_under_colliding_hashes() -> None:
    """Under a constant hash the same blocks in another order are another prefix."""
    pool = BlockPool(8, 2, hash_key=lambda content: 0)
    pool.release(fill(pool, [1, 2, 3, 4]))
    assert cached(pool, [3, 4, 1, 2, 9]) == 0
    assert cached(pool, [1, 2, 1, 2, 9]) == 2


def test_quality_order() -> None:
    """A variant's KV serves its own and lower demands."""
    assert [str(variant) for variant in BEST_FIRST] == ["fp32", "bf16", "int8", "fp8", "int4"]
    assert set(BEST_FIRST) == set(Variant)
    for i, writer in enumerate(BEST_FIRST):
        assert [serves(writer, reader) for reader in BEST_FIRST] == [j >= i for j in range(5)]
    assert worst((Variant.FP8, Variant.FP32)) is Variant.FP8


def test_both_qualities_side_by_side() -> None:
    """A prefix cached by two variants gives each request the KV of its own."""
    pool = BlockPool(8, 2)
    low = fill(pool, [1, 2], variant=INT4)
    high = fill(pool, [1, 2], variant=BF16)
    assert low != high
    assert pool.match([1, 2, 3], SCOPE, INT4).blocks == tuple(low)
    assert pool.match([1, 2, 3], SCOPE, BF16).blocks == tuple(high)
    assert pool.match([1, 2, 3], SCOPE, Variant.INT8).blocks == tuple(high)


@pytest.mark.parametrize("seed", range(5))
def test_random_bookkeeping(seed: int) -> None:
    """Whatever is held, released and evicted, every block is in exactly one place and matches are right."""
    rng = random.Random(seed)
    pool = BlockPool(12, 2)
    content: dict[int, tuple[int, ...]] = {}
    held: list[list[int]] = []
    for _ in range(400):
        tokens = [rng.randrange(2) for _ in range(2 * rng.randint(1, 4))]
        if rng.random() < 0.5 and pool.n_free >= 4:
            variant = rng.choice([BF16, INT4])
            match = pool.match([*tokens, 0], SCOPE, variant)
            for i, block in enumerate(match.blocks):
                assert content[block] == tuple(tokens[: 2 * i + 2])
            blocks = fill(pool, tokens, variant=variant)
            content.update({block: tuple(tokens[: 2 * i + 2]) for i, block in enumerate(blocks)})
            held.append(blocks)
        elif held:
            pool.release(held.pop(rng.randrange(len(held))))
        distinct = {block for blocks in held for block in blocks}
        assert pool.n_free == 12 - len(distinct)
        for block in range(12):
            assert pool.references(block) == sum(blocks.count(block) for blocks in held)
    for blocks in held:
        pool.release(blocks)
    pool.evict_cached()
    assert pool.n_free == 12
    assert len(pool._index) == 0
