"""The kernels in torch operators: what runs where the native library does not, and what it is tested against.

Weights are widened in slices of a few megabytes, so that a large matrix never exists twice.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from paceline_engine.kernels.meta import AttentionMeta
from paceline_engine.kernels.weights import INT4_GROUP, Fp8Weight, Int4Weight, Int8Weight
from paceline_engine.model.spec import Activation

_SLICE_ELEMENTS = 1 << 20
_QUERY_ROWS = 256
_SMALLEST_STEP = torch.finfo(torch.float32).tiny


def linear_fp32(x: Tensor, w: Tensor) -> Tensor:
    return functional.linear(x, w)


def linear_bf16(x: Tensor, w: Tensor) -> Tensor:
    out = x.new_empty((x.shape[0], w.shape[0]))
    for rows in _weight_slices(*w.shape):
        out[:, rows] = functional.linear(x, w[rows].float())
    return out


def linear_fp8(x: Tensor, w: Fp8Weight) -> Tensor:
    out = x.new_empty((x.shape[0], w.shape[0]))
    for rows in _weight_slices(*w.shape):
        out[:, rows] = functional.linear(x, w.codes[rows].float())
    return out.mul_(w.scale)


def activation_limit(n_inputs: int) -> int:
    """Largest activation code for int8 weights: as wide as 32-bit sums over K products allow."""
    return min(32767, (2**31 - 1) // (127 * max(1, n_inputs)))


def quantize_rows(x: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """Round each row of fp32 [M, K] to whole numbers within ±limit.

    Returns:
        The codes as fp32 [M, K] and the scales fp32 [M, 1]: 0 for rows that are all but zero (largest value
        below ``limit`` times the smallest normal number), NaN for rows that hold NaN or infinity.
    """
    peak = x.abs().amax(1, keepdim=True) if x.shape[1] else x.new_zeros((x.shape[0], 1))
    scale = peak / limit
    usable = scale.isfinite() & (scale >= _SMALLEST_STEP)
    codes = (x / torch.where(usable, scale, 1.0)).round_().clamp_(-limit, limit)
    codes = torch.where(usable, codes, 0.0)
    scale = torch.where(peak.isfinite(), torch.where(usable, scale, 0.0), torch.nan)
    return codes, scale


def linear_int8(x: Tensor, w: Int8Weight) -> Tensor:
    codes, scale = quantize_rows(x, activation_limit(w.shape[1]))
    out = x.new_empty((x.shape[0], w.shape[0]))
    for rows in _weight_slices(*w.shape):
        out[:, rows] = functional.linear(codes, w.codes[rows].float())
    return out.mul_(scale).mul_(w.scale)


def linear_int4(x: Tensor, w: Int4Weight) -> Tensor:
    codes, scale = quantize_rows(x, 32767)
    out = x.new_empty((x.shape[0], w.shape[0]))
    for rows in _weight_slices(*w.shape):
        part = Int4Weight(
            codes=w.codes[rows], scale=w.scale[rows], minimum=w.minimum[rows], n_inputs=w.n_inputs
        )
        out[:, rows] = functional.linear(codes, part.dequantize())
    return out.mul_(scale)


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMeta, *, scale: float, window: int | None
) -> Tensor:
    out = torch.empty_like(q)
    block_size, n_kv_heads = k_cache.shape[1], k_cache.shape[2]
    starts, positions = meta.query_starts.tolist(), meta.positions.tolist()
    for sequence, position in enumerate(positions):
        start, end = starts[sequence], starts[sequence + 1]
        if start == end:
            continue
        n_context = position + end - start
        blocks = meta.block_tables[sequence, : -(-n_context // block_size)].long()
        keys, values = (
            cache[blocks].flatten(0, 1)[:n_context].float().transpose(0, 1) for cache in (k_cache, v_cache)
        )  # [n_kv_heads, n_context, head_dim]
        for first in range(start, end, _QUERY_ROWS):
            last = min(first + _QUERY_ROWS, end)
            at = torch.arange(first, last, device=q.device) - start + position
            out[first:last] = _attend(q[first:last], keys, values, at, n_kv_heads, scale, window)
    return out


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, at: Tensor, n_kv_heads: int, scale: float, window: int | None
) -> Tensor:
    """Attention of rows q [rows, n_heads, head_dim] that stand at positions ``at`` over one sequence."""
    n_rows, n_heads, head_dim = q.shape
    begin = 0 if window is None else max(0, int(at[0]) - window + 1)
    end = int(at[-1]) + 1
    keys, values = keys[:, begin:end], values[:, begin:end]
    columns = torch.arange(begin, end, device=q.device)
    hidden = columns > at[:, None]
    if window is not None:
        hidden |= columns <= at[:, None] - window
    grouped = q.view(n_rows, n_kv_heads, n_heads // n_kv_heads, head_dim).permute(1, 2, 0, 3)
    scores = (grouped @ keys.transpose(1, 2)[:, None]).mul_(scale).masked_fill_(hidden, -torch.inf)
    mixed = scores.softmax(-1) @ values[:, None]  # [n_kv_heads, group, rows, head_dim]
    return mixed.permute(2, 0, 1, 3).reshape(n_rows, n_heads, head_dim)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, eps)  # one kernel on CUDA


def residual_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, post_weight: Tensor | None
) -> Tensor:
    residual += x if post_weight is None else rms_norm(x, post_weight, eps)
    return rms_norm(residual, weight, eps)


def rope_and_cache(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    n_heads: int,
    bias: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> Tensor:
    n_kv_heads, head_dim = k_cache.shape[2], k_cache.shape[3]
    if bias is not None:
        qkv = qkv + bias
    heads = qkv.view(qkv.shape[0], n_heads + 2 * n_kv_heads, head_dim)
    q, k, v = heads[:, :n_heads], heads[:, n_heads:-n_kv_heads], heads[:, -n_kv_heads:]
    q = _rotate(q if q_norm is None else rms_norm(q, q_norm, eps), cos, sin)
    k = _rotate(k if k_norm is None else rms_norm(k, k_norm, eps), cos, sin)
    k_cache.view(-1, n_kv_heads, head_dim)[slots] = k.to(k_cache.dtype)
    v_cache.view(-1, n_kv_heads, head_dim)[slots] = v.to(v_cache.dtype)
    return q


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [T, heads, head_dim] in the half-split order; cos, sin: [T, head_dim / 2]."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def gated_activation(gate_up: Tensor, activation: Activation) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if activation is Activation.SILU:
        return functional.silu(gate) * up
    return functional.gelu(gate, approximate="tanh") * up


def _weight_slices(n_rows: int, n_inputs: int) -> list[slice]:
    size = max(INT4_GROUP, _SLICE_ELEMENTS // max(1, n_inputs))
    return [slice(start, min(start + size, n_rows)) for start in range(0, n_rows, size)]
