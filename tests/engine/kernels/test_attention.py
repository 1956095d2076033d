"""Paged attention: native against torch's own, over caches, windows, groups, batches and threads."""

from itertools import pairwise

import pytest
import torch
from torch.nn import functional

from paceline_engine.errors import InvalidValueError
from paceline_engine.kernels import AttentionMeta, fallback, paged_attention

BLOCK = 16


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


def make_meta(sequences, n_blocks, *, seed=0):
    """Metadata for (position, new tokens) pairs, with blocks handed out in random order."""
    order = torch.randperm(n_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    counts = [-(-(position + new) // BLOCK) for position, new in sequences]
    tables = [[order.pop() for _ in range(count)] + [2**30] * (max(counts) - count) for count in counts]
    starts = [0]
    for _, new in sequences:
        starts.append(starts[-1] + new)
    return AttentionMeta(
        query_starts=ints(starts), positions=ints([p for p, _ in sequences]), block_tables=ints(tables)
    )


def sdpa(q, k_cache, v_cache, meta, sequence, *, scale, window):
    """One sequence through torch's scaled_dot_product_attention with an explicit mask."""
    start, end = meta.query_starts[sequence].item(), meta.query_starts[sequence + 1].item()
    position = meta.positions[sequence].item()
    total = position + end - start
    blocks = meta.block_tables[sequence, : -(-total // BLOCK)].long()
    k, v = (c[blocks].flatten(0, 1)[:total].float().transpose(0, 1)[None] for c in (k_cache, v_cache))
    at, columns = torch.arange(position, total)[:, None], torch.arange(total)
    mask = (columns <= at) & (columns > at - (window or total + 1))
    rows = q[start:end].transpose(0, 1)[None]
    out = functional.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


MIXES = [
    [(0, 1)],
    [(0, 70)],
    [(63, 1)],
    [(64, 1)],
    [(300, 1), (5, 1), (0, 33), (130, 7)],
    [(15, 17), (31, 1), (0, 16)],
    [(200, 90)],
]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("window", [None, 1, 2, 64, 65, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equals_torch(native, rand, mix, window, dtype):
    """Prefill, decode and both together equal torch's attention, at every window edge."""
    meta = make_meta(mix, 40)
    k, v = rand(40, BLOCK, 2, 24).to(dtype), rand(40, BLOCK, 2, 24).to(dtype)
    q = rand(int(meta.query_starts[-1]), 6, 24)
    result = native.paged_attention(q, k, v, meta, scale=0.3, window=window)
    mine = fallback.paged_attention(q, k, v, meta, scale=0.3, window=window)
    reference = torch.cat([sdpa(q, k, v, meta, s, scale=0.3, window=window) for s in range(len(mix))], dim=0)
    torch.testing.assert_close(result, reference, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(mine, reference, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 8), (4, 1, 256), (7, 7, 20), (64, 1, 16)])
def test_head_shapes(native, rand, heads, kv_heads, head_dim):
    """One head, many heads of one key head, no sharing, and a head size that is no multiple of a vector."""
    meta = make_meta([(77, 1), (0, 20)], 10)
    k, v = rand(10, BLOCK, kv_heads, head_dim).bfloat16(), rand(10, BLOCK, kv_heads, head_dim).bfloat16()
    q = rand(21, heads, head_dim)
    result = native.paged_attention(q, k, v, meta, scale=0.1, window=None)
    torch.testing.assert_close(
        result, fallback.paged_attention(q, k, v, meta, scale=0.1, window=None), rtol=1e-4, atol=2e-5
    )


@pytest.mark.parametrize("window", [None, 50])
def test_a_row_is_the_same_bits_alone_in_a_batch_and_in_every_chunk(native, rand, window):
    """A token's output is the same bits in one prefill, in a prefill cut anywhere, and beside others."""
    k, v = rand(40, BLOCK, 1, 32).bfloat16(), rand(40, BLOCK, 1, 32).bfloat16()
    q = rand(150, 4, 32)
    whole_meta = make_meta([(0, 150)], 40)
    whole = native.paged_attention(q, k, v, whole_meta, scale=0.2, window=window)
    for cuts in ((0, 1, 2, 65, 150), (0, 63, 64, 128, 149, 150)):
        for first, last in pairwise(cuts):
            meta = AttentionMeta(
                query_starts=ints([0, last - first]),
                positions=ints([first]),
                block_tables=whole_meta.block_tables,
            )
            part = native.paged_attention(q[first:last], k, v, meta, scale=0.2, window=window)
            assert torch.equal(part, whole[first:last])
    together = AttentionMeta(
        query_starts=ints([0, 1, 2, 3]),
        positions=ints([149, 80, 3]),
        block_tables=whole_meta.block_tables.repeat(3, 1),
    )
    batch = native.paged_attention(q[[149, 80, 3]], k, v, together, scale=0.2, window=window)
    assert torch.equal(batch, whole[[149, 80, 3]])


def test_threads_and_block_order_do_not_change_bits(native, rand):
    """Neither the number of threads nor where the blocks lie changes a bit."""
    k, v = rand(30, BLOCK, 2, 32), rand(30, BLOCK, 2, 32)
    q = rand(102, 4, 32)
    meta = make_meta([(300, 1), (40, 100), (9, 1)], 30)
    torch.set_num_threads(1)
    alone = native.paged_attention(q, k, v, meta, scale=0.2, window=None)
    shuffle = torch.randperm(30, generator=torch.Generator().manual_seed(5))
    moved = AttentionMeta(
        query_starts=meta.query_starts,
        positions=meta.positions,
        block_tables=shuffle.argsort()[meta.block_tables.clamp(max=29).long()].int(),
    )
    for n_threads in (1, 2, 3, 8):
        torch.set_num_threads(n_threads)
        assert torch.equal(native.paged_attention(q, k, v, meta, scale=0.2, window=None), alone)
        result = native.paged_attention(q, k[shuffle], v[shuffle], moved, scale=0.2, window=None)
        assert torch.equal(result, alone)


def test_stale_values_outside_the_context_are_never_read(kernels, rand):
    """NaN left in unused slots, in unused blocks and before the window does not reach the output."""
    meta = make_meta([(70, 3)], 8)
    k, v = rand(8, BLOCK, 1, 16), rand(8, BLOCK, 1, 16)
    q = rand(3, 2, 16)
    clean = kernels.paged_attention(q, k, v, meta, scale=0.2, window=20)
    used = torch.zeros(8 * BLOCK, dtype=torch.bool)
    for position in range(70 - 19, 73):
        used[int(meta.block_tables[0, position // BLOCK]) * BLOCK + position % BLOCK] = True
    for cache in (k, v):
        cache.view(-1, 1, 16)[~used] = float("nan")
    assert torch.equal(kernels.paged_attention(q, k, v, meta, scale=0.2, window=20), clean)


def test_large_scores_do_not_overflow(kernels, rand):
    """Scores in the thousands give finite weights that sum to one."""
    meta = make_meta([(100, 1)], 8)
    k, v = rand(8, BLOCK, 1, 16) * 100, torch.ones(8, BLOCK, 1, 16)
    result = kernels.paged_attention(rand(1, 2, 16) * 100, k, v, meta, scale=1.0, window=None)
    torch.testing.assert_close(result, torch.ones(1, 2, 16))


def test_no_tokens(kernels, rand):
    """A pass without tokens gives none, and a sequence without new tokens is passed over."""
    k = rand(4, BLOCK, 1, 16)
    empty = AttentionMeta(query_starts=ints([0]), positions=ints([]), block_tables=ints([[]]).view(0, 0))
    assert kernels.paged_attention(rand(0, 2, 16), k, k, empty, scale=1.0, window=None).shape == (0, 2, 16)
    meta = AttentionMeta(query_starts=ints([0, 0, 1]), positions=ints([9, 2]), block_tables=ints([[99], [1]]))
    q = rand(1, 2, 16)
    torch.testing.assert_close(
        kernels.paged_attention(q, k, k, meta, scale=1.0, window=None),
        fallback.paged_attention(q, k, k, meta, scale=1.0, window=None),
    )


@pytest.mark.parametrize(
    "meta",
    [
        AttentionMeta(query_starts=ints([0, 1]), positions=ints([3]), block_tables=ints([[4]])),
        AttentionMeta(query_starts=ints([0, 1]), positions=ints([3]), block_tables=ints([[-1]])),
        AttentionMeta(query_starts=ints([0, 1]), positions=ints([16]), block_tables=ints([[0]])),
        AttentionMeta(query_starts=ints([0, 1]), positions=ints([-1]), block_tables=ints([[0]])),
    ],
)
def test_a_block_outside_the_cache_is_refused(native, rand, meta):
    """A table that names no block of the cache is an error, not a read of foreign memory."""
    k = rand(4, BLOCK, 1, 16)
    with pytest.raises(InvalidValueError, match="block_tables"):
        native.paged_attention(rand(1, 2, 16), k, k, meta, scale=1.0, window=None)


def test_a_window_below_one_is_refused(rand):
    """A window that leaves out the token itself is an error."""
    k = rand(4, BLOCK, 1, 16)
    with pytest.raises(InvalidValueError, match="window"):
        paged_attention(rand(1, 2, 16), k, k, make_meta([(3, 1)], 4), scale=1.0, window=0)


def test_metadata_of_the_wrong_type_is_refused():
    """int64 metadata is an error, since the kernels read int32."""
    with pytest.raises(InvalidValueError, match="positions"):
        AttentionMeta(query_starts=ints([0, 1]), positions=torch.tensor([3]), block_tables=ints([[0]]))


def test_a_window_far_shorter_than_a_tile_writes_within_its_room(native, rand):
    """Rows whose window begins a chunk after their tile's write nothing beside the scores of the chunk."""
    # Without sharing a tile has the most tokens. A write beside its room aborts in the allocator.
    meta = make_meta([(0, 400), (17, 333)], 60)
    k, v = rand(60, BLOCK, 3, 16), rand(60, BLOCK, 3, 16)
    q = rand(733, 3, 16)
    for window in (1, 3, 8, 30):
        result = native.paged_attention(q, k, v, meta, scale=0.2, window=window)
        expected = fallback.paged_attention(q, k, v, meta, scale=0.2, window=window)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=2e-5)
