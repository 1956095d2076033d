"""Planned attention against the CPU's kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline_engine.cuda.attention import UnequalPlan, UniformPlan
from paceline_engine.kernels import AttentionMeta, paged_attention

BLOCK_SIZE = 4
WINDOWS = [None, 1, 5, 8, 100]


def cache(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    k, v = (torch.randn((32, BLOCK_SIZE, 2, 8), generator=generator).to(dtype) for _ in range(2))
    return k, v


def tables(n_sequences: int) -> Tensor:
    order = torch.randperm(32, generator=torch.Generator().manual_seed(4))
    return order[: n_sequences * (32 // n_sequences)].view(n_sequences, -1).int().contiguous()


def queries(n_tokens: int) -> Tensor:
    return torch.randn((n_tokens, 6, 8), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", WINDOWS)
def test_unequal_sequences(window: int | None, dtype: torch.dtype) -> None:
    """A decode, a prefill and a chunk in one pass attend as in the kernel."""
    starts, positions, blocks = [0, 1, 9, 12], [17, 0, 30], tables(3)
    k, v = cache(dtype)
    q = queries(12)
    meta = AttentionMeta(
        query_starts=torch.tensor(starts, dtype=torch.int32),
        positions=torch.tensor(positions, dtype=torch.int32),
        block_tables=blocks,
    )
    plan = UnequalPlan.build(
        query_starts=starts,
        positions=positions,
        block_tables=blocks.numpy(),
        windows={window},
        block_size=BLOCK_SIZE,
        flash=False,
        device=torch.device("cpu"),
    )
    found = plan.attend(q, k, v, scale=0.3, window=window)
    expected = paged_attention(q, k, v, meta, scale=0.3, window=window)
    limit = 1e-5 if dtype == torch.float32 else 0.03
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("n_rows", [1, 3])
@pytest.mark.parametrize("window", WINDOWS)
def test_equal_sequences(window: int | None, n_rows: int) -> None:
    """Decode and verification of as many tokens each attend as in the kernel, wherever they stand."""
    for shift in range(5):
        positions = torch.tensor([0, 3 + shift, 24 + shift - n_rows])
        blocks = tables(3)
        k, v = cache()
        q = queries(3 * n_rows)
        meta = AttentionMeta(
            query_starts=(torch.arange(4) * n_rows).int(), positions=positions.int(), block_tables=blocks
        )
        plan = UniformPlan.build(
            blocks.long(), positions, n_rows=n_rows, windows=(window,), block_size=BLOCK_SIZE, flash=False
        )
        found = plan.attend(q, k, v, scale=0.3, window=window)
        expected = paged_attention(q, k, v, meta, scale=0.3, window=window)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_window_gathers_no_more_than_it_reaches() -> None:
    """The work of a sliding layer does not grow with the context."""
    plan = UniformPlan.build(
        tables(1).long(),
        torch.tensor([100]),
        n_rows=1,
        windows=(None, 5),
        block_size=BLOCK_SIZE,
        flash=False,
    )
    assert plan.reaches[None].blocks.shape == (1, 32)
    assert plan.reaches[5].blocks.shape == (1, 2)
    unequal = UnequalPlan.build(
        query_starts=[0, 2],
        positions=[100],
        block_tables=tables(1).numpy(),
        windows=(None, 5),
        block_size=BLOCK_SIZE,
        flash=False,
        device=torch.device("cpu"),
    )
    assert unequal.gathered[None].slots.shape == (102,)
    assert unequal.gathered[5].slots.shape == (6,)


def test_what_an_earlier_sequence_left_behind_is_never_read() -> None:
    """NaN in the unused rest of a block, and in blocks past the context, reaches no result."""
    blocks = tables(2)
    k, v = cache()
    q = queries(2)
    plan = UniformPlan.build(
        blocks.long(), torch.tensor([5, 9]), n_rows=1, windows=(None,), block_size=BLOCK_SIZE, flash=False
    )
    expected = plan.attend(q, k, v, scale=0.3, window=None)
    for sequence, used in ((0, 6), (1, 10)):
        for position in range(used, blocks.shape[1] * BLOCK_SIZE):
            for part in (k, v):
                part[blocks[sequence, position // BLOCK_SIZE], position % BLOCK_SIZE] = torch.nan
    torch.testing.assert_close(plan.attend(q, k, v, scale=0.3, window=None), expected)
