"""The two operators that differ by device: the kernels on a CPU, ``paceline_engine.cuda`` on a GPU."""

from __future__ import annotations

from typing import Protocol, cast

from torch import Tensor
from torch.nn import functional

from paceline_engine import kernels
from paceline_engine.cuda.matrices import DeviceMatrix
from paceline_engine.kernels import AttentionMeta, Bf16Weight, Fp8Weight, Int4Weight, Int8Weight
from paceline_engine.quant.matrix import Fp32Weight, Matrix


class AttentionPlan(Protocol):
    """Attention worked out for one pass, as ``cuda.attention`` makes it."""

    def attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, *, scale: float, window: int | None
    ) -> Tensor: ...


def linear(x: Tensor, matrix: Matrix) -> Tensor:
    """x @ matrix.T for fp32 x [M, K]; fp32 [M, N]."""
    match matrix:
        case Fp32Weight():
            return kernels.linear_fp32(x, matrix.data) if x.is_cpu else functional.linear(x, matrix.data)
        case Bf16Weight():
            return kernels.linear_bf16(x, matrix)
        case Int8Weight():
            return kernels.linear_int8(x, matrix)
        case Fp8Weight():
            return kernels.linear_fp8(x, matrix)
        case Int4Weight():
            return kernels.linear_int4(x, matrix)
        case _:
            return cast("DeviceMatrix", matrix).multiply(x)


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMeta | AttentionPlan,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """Causal attention of new tokens over the paged cache, as ``kernels.paged_attention``."""
    if isinstance(meta, AttentionMeta):
        return kernels.paged_attention(q, k_cache, v_cache, meta, scale=scale, window=window)
    return meta.attend(q, k_cache, v_cache, scale=scale, window=window)
