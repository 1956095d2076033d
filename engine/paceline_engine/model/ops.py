"""The two operators that differ by device: on a CPU the kernels, elsewhere torch."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from paceline_engine import kernels
from paceline_engine.kernels import AttentionMeta, Bf16Weight, Fp8Weight, Int4Weight, Int8Weight
from paceline_engine.quant.matrix import Fp32Weight, Matrix


def linear(x: Tensor, matrix: Matrix) -> Tensor:
    """x @ matrix.T for fp32 x [M, K]; fp32 [M, N]."""
    if x.device.type != "cpu":
        return _device_linear(x, matrix)
    match matrix:
        case Fp32Weight():
            return kernels.linear_fp32(x, matrix.data)
        case Bf16Weight():
            return kernels.linear_bf16(x, matrix)
        case Int8Weight():
            return kernels.linear_int8(x, matrix)
        case Fp8Weight():
            return kernels.linear_fp8(x, matrix)
        case _:
            return kernels.linear_int4(x, cast("Int4Weight", matrix))


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMeta, *, scale: float, window: int | None
) -> Tensor:
    """Causal attention of new tokens over the paged cache, as ``kernels.paged_attention``."""
    if q.device.type == "cpu":
        return kernels.paged_attention(q, k_cache, v_cache, meta, scale=scale, window=window)
    return gathered_attention(q, k_cache, v_cache, meta, scale=scale, window=window)


def _device_linear(x: Tensor, matrix: Matrix) -> Tensor:
    if isinstance(matrix, Fp32Weight):
        return functional.linear(x, matrix.data)
    if isinstance(matrix, Bf16Weight):
        return functional.linear(x.to(torch.bfloat16), matrix.data).float()
    return functional.linear(x, matrix.dequantize())


def gathered_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMeta, *, scale: float, window: int | None
) -> Tensor:
    """Paged attention out of torch's fused attention, one sequence after the other, on any device.

    Gathers the blocks that a sequence's window reaches and masks what its rows must not see.
    """
    out = torch.empty_like(q)
    block_size = k_cache.shape[1]
    starts, positions = meta.query_starts.tolist(), meta.positions.tolist()
    for index, position in enumerate(positions):
        start, end = starts[index], starts[index + 1]
        n_context = position + end - start
        first = 0 if window is None else max(0, position - window + 1) // block_size
        blocks = meta.block_tables[index, first : -(-n_context // block_size)].long()
        keys, values = (
            cache[blocks].flatten(0, 1)[: n_context - first * block_size].to(q.dtype).transpose(0, 1)
            for cache in (k_cache, v_cache)
        )  # [n_kv_heads, n_gathered, head_dim]
        rows = torch.arange(position, n_context, device=q.device)[:, None]
        columns = torch.arange(first * block_size, n_context, device=q.device)
        visible = columns <= rows
        if window is not None:
            visible &= columns > rows - window
        mixed = functional.scaled_dot_product_attention(
            q[start:end].transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=visible,
            scale=scale,
            enable_gqa=True,
        )
        out[start:end] = mixed[0].transpose(0, 1)
    return out
