from __future__ import annotations

import random

from paceline_engine.cache.blocks import BlockPool
from paceline_engine.cache.pins import Pins
from paceline_engine.cache.prefix import CacheScope, PrefixNode
from paceline_engine.mode import Variant

SCOPE = CacheScope(model="m")


def cache(pool: BlockPool, token_ids: list[int], variant: Variant = Variant.BF16) -> None:
    """Leave the full blocks of the tokens in the cache, written by ``variant``."""
    parent: PrefixNode | CacheScope = SCOPE
    blocks: list[int] = []
    for start in range(0, len(token_ids) - pool.block_size + 1, pool.block_size):
        (block,) = pool.allocate(1)
        parent, block = pool.publish(parent, block, token_ids[start : start + pool.block_size], variant)
        blocks.append(block)
    pool.release(blocks)


def served(pool: BlockPool, token_ids: list[int], variant: Variant = Variant.BF16) -> int:
    return pool.cached_tokens([*token_ids, 0], SCOPE, (variant,))[variant]


def test_a_pinned_prefix_outlives_traffic_that_evicts_the_rest() -> None:
    """Other prompts take every block but the pinned ones; unpinned, those go too."""
    pool = BlockPool(8, 2)
    pins = Pins(pool, max_share=0.5)
    cache(pool, [1, 2, 3, 4])
    cache(pool, [5, 6, 7, 8])
    assert pins.pin("p", [1, 2, 3, 4, 9], SCOPE, expires_at_s=10.0) == 4
    pool.release(pool.allocate(pool.n_free))
    assert (served(pool, [1, 2, 3, 4]), served(pool, [5, 6, 7, 8])) == (4, 0)
    assert pool.n_free == 6
    pins.unpin("p")
    pool.release(pool.allocate(pool.n_free))
    assert (served(pool, [1, 2, 3, 4]), pool.n_free, pins.n_blocks) == (0, 8, 0)


def test_shared_blocks_are_held_until_the_last_pin_ends() -> None:
    """Two pins with a common prefix count its blocks once and hold them until both are gone."""
    pool = BlockPool(8, 2)
    pins = Pins(pool, max_share=1.0)
    cache(pool, [1, 2, 3, 4])
    cache(pool, [1, 2, 5, 6])
    pins.pin("a", [1, 2, 3, 4], SCOPE, expires_at_s=10.0)
    pins.pin("b", [1, 2, 5, 6], SCOPE, expires_at_s=20.0)
    assert pins.n_blocks == 3
    pins.expire(15.0)
    assert (pins.n_blocks, served(pool, [1, 2, 5, 6])) == (2, 4)
    pins.unpin("a")
    pins.unpin("unknown")
    assert pins.n_blocks == 2


def test_no_more_than_its_share_is_pinned() -> None:
    """A pin holds the leading blocks that the share has room for, and nothing of what is not cached."""
    pool = BlockPool(8, 2)
    pins = Pins(pool, max_share=0.4)
    cache(pool, list(range(10)))
    assert pins.pin("p", list(range(10)), SCOPE, expires_at_s=1.0) == 6
    assert pins.pin("q", [50, 51], SCOPE, expires_at_s=1.0) == 0
    cache(pool, [90, 91])
    assert pins.pin("r", [90, 91], SCOPE, expires_at_s=1.0) == 0
    # Made again it is counted anew, and not on top of itself.
    assert pins.pin("p", list(range(10)), SCOPE, expires_at_s=1.0) == 6
    assert Pins(pool, max_share=0.0).pin("p", list(range(10)), SCOPE, expires_at_s=1.0) == 0


def test_the_best_variant_of_each_block_is_pinned() -> None:
    """Where several variants wrote a block, the one that serves the most is kept."""
    pool = BlockPool(8, 2)
    pins = Pins(pool, max_share=1.0)
    cache(pool, [1, 2], Variant.INT4)
    cache(pool, [1, 2], Variant.BF16)
    pins.pin("p", [1, 2], SCOPE, expires_at_s=1.0)
    pool.release(pool.allocate(pool.n_free))
    assert served(pool, [1, 2], Variant.BF16) == served(pool, [1, 2], Variant.INT4) == 2
    assert pins.n_blocks == 1


def test_pins_drop_oldest_first_until_none_is_left() -> None:
    """Dropping takes the pin that was made first, and says when there is nothing to drop."""
    pool = BlockPool(8, 2)
    pins = Pins(pool, max_share=1.0)
    cache(pool, [1, 2])
    cache(pool, [3, 4])
    pins.pin("a", [1, 2], SCOPE, expires_at_s=1.0)
    pins.pin("b", [3, 4], SCOPE, expires_at_s=1.0)
    assert pins.drop_oldest()
    pool.release(pool.allocate(pool.n_free))
    assert (served(pool, [1, 2]), served(pool, [3, 4])) == (0, 2)
    assert [pins.drop_oldest(), pins.drop_oldest()] == [True, False]


def test_any_order_of_pins_gives_all_blocks_back() -> None:
    """After random pins, expiries, traffic and unpins no block is lost and the share was never exceeded."""
    rng = random.Random(3)
    pool = BlockPool(32, 2)
    pins = Pins(pool, max_share=0.5)
    for now in range(400):
        tokens = [rng.randrange(3) for _ in range(2 * rng.randrange(1, 6))]
        name = f"p{rng.randrange(6)}"
        match rng.randrange(4):
            case 0 if pool.n_free >= len(tokens) // 2:
                cache(pool, tokens, rng.choice([Variant.BF16, Variant.INT4]))
            case 1:
                pins.pin(name, tokens, SCOPE, expires_at_s=now + rng.randrange(1, 40))
            case 2:
                pins.unpin(name)
            case _:
                pins.expire(now)
        assert pins.n_blocks <= 16
        assert pool.n_free + pins.n_blocks == 32
    pins.expire(1e9)
    assert (pool.n_free, pins.n_blocks) == (32, 0)
