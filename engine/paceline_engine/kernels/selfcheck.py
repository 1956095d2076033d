"""Compares an instruction set's kernels with the torch fallbacks on small inputs, in some milliseconds.

Not every processor that users have was at hand when the kernels were written; a kernel that is wrong on one
of them must never be used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from paceline_engine.kernels import fallback
from paceline_engine.kernels.meta import AttentionMeta
from paceline_engine.kernels.native import NativeKernels
from paceline_engine.kernels.packing import pack_fp8, pack_int4, pack_int8
from paceline_engine.kernels.weights import Fp8Weight
from paceline_engine.model.spec import Activation

_Random = Callable[..., Tensor]

_TOLERANCE = 1e-4
"""Largest difference, as a share of the reference's largest value."""


def first_wrong(kernels: NativeKernels) -> str | None:
    """The name of the first kernel whose result differs from the reference, or None."""
    for name, result, reference in _comparisons(kernels):
        limit = _TOLERANCE * float(reference.abs().max())
        if not bool(((result - reference).abs() <= limit).all()):
            return name
    return None


def _comparisons(kernels: NativeKernels) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, native result, reference) of each kernel."""
    random = torch.Generator().manual_seed(1)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    w = rand(9, 195)
    int8, int4, fp8 = pack_int8(w), pack_int4(w), pack_fp8(w)
    for n_rows in (1, 6):
        x = rand(n_rows, 195)
        yield "linear_fp32", kernels.linear_fp32(x, w), fallback.linear_fp32(x, w)
        half = w.bfloat16()
        yield "linear_bf16", kernels.linear_bf16(x, half), fallback.linear_bf16(x, half)
        yield "linear_fp8", kernels.linear_fp8(x, fp8), fallback.linear_fp8(x, fp8)
        yield "linear_int8", kernels.linear_int8(x, int8), fallback.linear_int8(x, int8)
        yield "linear_int4", kernels.linear_int4(x, int4), fallback.linear_int4(x, int4)
    codes = Fp8Weight(
        codes=torch.arange(256)
        .to(torch.uint8)[:, None]
        .expand(-1, 80)
        .contiguous()
        .view(torch.float8_e4m3fn),
        scale=torch.ones(256),
    )
    one = torch.zeros(1, 80)
    one[0, 0] = 1.0
    finite = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F])
    yield "linear_fp8", kernels.linear_fp8(one, codes)[:, finite], codes.codes[finite, :1].float().T
    yield from _attention_comparisons(kernels, rand)
    yield from _fused_comparisons(kernels, rand)


def _attention_comparisons(kernels: NativeKernels, rand: _Random) -> Iterator[tuple[str, Tensor, Tensor]]:
    meta = AttentionMeta(
        query_starts=torch.tensor([0, 1, 12], dtype=torch.int32),
        positions=torch.tensor([89, 3], dtype=torch.int32),
        block_tables=torch.tensor([[2, 0, 5, 3, 1, 4], [6, 0, 0, 0, 0, 0]], dtype=torch.int32),
    )
    q, k, v = rand(12, 4, 40), rand(7, 16, 2, 40), rand(7, 16, 2, 40)
    for window in (None, 70):
        for cache in ((k, v), (k.bfloat16(), v.bfloat16())):
            result = kernels.paged_attention(q, *cache, meta, scale=0.2, window=window)
            yield (
                "paged_attention",
                result,
                fallback.paged_attention(q, *cache, meta, scale=0.2, window=window),
            )


def _fused_comparisons(kernels: NativeKernels, rand: _Random) -> Iterator[tuple[str, Tensor, Tensor]]:
    x, residual, weight, post = rand(3, 75), rand(3, 75), rand(75), rand(75)
    yield "rms_norm", kernels.rms_norm(x, weight, 1e-6), fallback.rms_norm(x, weight, 1e-6)
    ours, theirs = residual.clone(), residual.clone()
    result = kernels.residual_norm(x, ours, weight, 1e-6, post)
    yield "residual_norm", result, fallback.residual_norm(x, theirs, weight, 1e-6, post)
    yield "residual_norm", ours, theirs
    for activation in Activation:
        gate_up = rand(3, 2 * 37) * 4
        result = kernels.gated_activation(gate_up, activation)
        yield "gated_activation", result, fallback.gated_activation(gate_up, activation)
    caches = [torch.zeros(2, 4, 2, 24, dtype=torch.bfloat16) for _ in range(4)]
    qkv, cos, sin, slots = rand(3, 8 * 24), rand(3, 12), rand(3, 12), torch.tensor([5, 0, 3])
    bias, norm = rand(8 * 24), rand(24)
    q = kernels.rope_and_cache(qkv, cos, sin, slots, caches[0], caches[1], 4, bias, norm, None, 1e-6)
    reference = fallback.rope_and_cache(qkv, cos, sin, slots, caches[2], caches[3], 4, bias, norm, None, 1e-6)
    yield "rope_and_cache", q, reference
    for ours, theirs in zip(caches[:2], caches[2:], strict=True):
        # Values next to a tie may round either way.
        wide, reference = ours.float(), theirs.float()
        near = (wide - reference).abs() <= reference.abs() / 128
        yield "rope_and_cache", torch.where(near, reference, wide), reference
