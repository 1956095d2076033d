"""The operators that the decoder is made of: the native kernel where there is one, else torch.

Rows never influence each other. Natively a row's result does not depend on how many rows share the call, on
what they hold, or on the number of threads, bit for bit: every output is summed in one fixed order, whatever
the shape of the call. The torch fallbacks give the same values within rounding, without that promise.

Inputs are fp32; the tensors that hold weights, caches and metadata are contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline_engine.errors import InvalidValueError
from paceline_engine.kernels import fallback
from paceline_engine.kernels.meta import AttentionMeta
from paceline_engine.kernels.selection import native_for
from paceline_engine.kernels.weights import Bf16Weight, Fp8Weight, Int4Weight, Int8Weight
from paceline_engine.model.spec import Activation


def linear_fp32(x: Tensor, w: Tensor) -> Tensor:
    """x @ w.T for fp32 x [M, K] and w [N, K]; fp32 [M, N]."""
    x = _rows(x, w.shape[1])
    native = native_for(x)
    return fallback.linear_fp32(x, w) if native is None else native.linear_fp32(x, w)


def linear_bf16(x: Tensor, w: Bf16Weight | Tensor) -> Tensor:
    """x @ w.T for fp32 x [M, K] and bf16 w [N, K]; products and sums in fp32; fp32 [M, N]."""
    data = w.data if isinstance(w, Bf16Weight) else w
    x = _rows(x, data.shape[1])
    native = native_for(x)
    return fallback.linear_bf16(x, data) if native is None else native.linear_bf16(x, data)


def linear_fp8(x: Tensor, w: Fp8Weight) -> Tensor:
    """x @ w.T for fp32 x [M, K] and e4m3fn w [N, K]; weights are widened, sums are fp32; fp32 [M, N]."""
    x = _rows(x, w.shape[1])
    native = native_for(x)
    return fallback.linear_fp8(x, w) if native is None else native.linear_fp8(x, w)


def linear_int8(x: Tensor, w: Int8Weight) -> Tensor:
    """x @ w.T for fp32 x [M, K] and int8 w [N, K]; fp32 [M, N].

    Each row of x is rounded to whole numbers as wide as exact 32-bit sums over K allow (15 bits with sign for
    K = 640, 14 for 2,048, at most 16), so the products are summed exactly and the rounding of x is far below
    that of the weights. A row of x with NaN or infinity gives a row of NaN; a row below 1e-34 gives zeros.
    """
    x = _rows(x, w.shape[1])
    native = native_for(x)
    return fallback.linear_int8(x, w) if native is None else native.linear_int8(x, w)


def linear_int4(x: Tensor, w: Int4Weight) -> Tensor:
    """x @ w.T for fp32 x [M, K] and 4-bit w [N, K]; fp32 [M, N].

    Each row of x is rounded to 16 bits; sums are exact within a group of 32 and fp32 across groups. Rows
    with NaN or infinity, and tiny rows, behave as for ``linear_int8``.
    """
    x = _rows(x, w.shape[1])
    native = native_for(x)
    return fallback.linear_int4(x, w) if native is None else native.linear_int4(x, w)


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMeta, *, scale: float, window: int | None
) -> Tensor:
    """Causal attention of new tokens over a paged cache that already holds their own keys and values.

    Blockwise with running maximum and sum (Milakov and Gimelshein, 2018; Dao et al., 2022). Query heads
    share key heads in consecutive groups.

    Args:
        q: fp32 [T, n_heads, head_dim].
        k_cache, v_cache: bf16 or fp32 [n_blocks, block_size, n_kv_heads, head_dim].
        scale: multiplies q·k.
        window: a token attends to itself and the ``window - 1`` before it; None for all before it.

    Returns:
        fp32 [T, n_heads, head_dim].
    """
    if window is not None and window < 1:
        raise InvalidValueError(
            "window", observed=window, limit="at least 1 or None", remedy="use None for full attention"
        )
    q = q.contiguous()
    native = native_for(q)
    if native is None:
        return fallback.paged_attention(q, k_cache, v_cache, meta, scale=scale, window=window)
    return native.paged_attention(q, k_cache, v_cache, meta, scale=scale, window=window)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension (Zhang and Sennrich, 2019); x: [M, K]."""
    native = native_for(x)
    if native is None:
        return fallback.rms_norm(x, weight, eps)
    return native.rms_norm(x.contiguous(), weight, eps)


def residual_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, post_weight: Tensor | None = None
) -> Tensor:
    """Add a sublayer's output to the residual stream, in place, and norm the stream for the next sublayer.

    With ``post_weight`` x is normed first (a norm after the sublayer, as in Gemma):
    ``residual += rms_norm(x, post_weight); return rms_norm(residual, weight)``.

    Args:
        x, residual: fp32 [M, K]; ``residual`` contiguous, changed in place.
        weight, post_weight: fp32 [K].
    """
    native = native_for(x)
    if native is None:
        return fallback.residual_norm(x, residual, weight, eps, post_weight)
    return native.residual_norm(x.contiguous(), residual, weight, eps, post_weight)


def rope_and_cache(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    n_heads: int,
    bias: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Split fused q, k and v, norm each head of q and k, rotate them, and write k and v to the cache.

    Args:
        qkv: fp32 [T, (n_heads + 2 * n_kv_heads) * head_dim].
        cos, sin: fp32 [T, head_dim / 2], for the half-split order: dimension i turns with i + head_dim / 2.
        slots: int64 [T]: ``block * block_size + offset`` of each token, all different.
        k_cache, v_cache: bf16 or fp32 [n_blocks, block_size, n_kv_heads, head_dim], changed in place.
        bias: fp32, one value for each column of qkv.
        q_norm, k_norm: fp32 [head_dim].

    Returns:
        q ready for attention, fp32 [T, n_heads, head_dim].
    """
    native = native_for(qkv)
    if native is None:
        return fallback.rope_and_cache(
            qkv, cos, sin, slots, k_cache, v_cache, n_heads, bias, q_norm, k_norm, eps
        )
    return native.rope_and_cache(
        qkv.contiguous(), cos, sin, slots, k_cache, v_cache, n_heads, bias, q_norm, k_norm, eps
    )


def gated_activation(gate_up: Tensor, activation: Activation) -> Tensor:
    """act(gate) * up for fused gate_up fp32 [M, 2 * F], gate in the first F columns; fp32 [M, F]."""
    native = native_for(gate_up)
    if native is None:
        return fallback.gated_activation(gate_up, activation)
    return native.gated_activation(gate_up.contiguous(), activation)


def _rows(x: Tensor, n_inputs: int) -> Tensor:
    """x as contiguous rows.

    Raises:
        InvalidValueError: x is not fp32 [M, n_inputs].
    """
    if x.ndim != 2 or x.shape[1] != n_inputs or x.dtype != torch.float32:
        raise InvalidValueError(
            "x",
            observed=f"{x.dtype} {list(x.shape)}",
            limit=f"fp32 [M, {n_inputs}]",
            remedy="flatten the batch into rows and widen to fp32",
        )
    return x.contiguous()
