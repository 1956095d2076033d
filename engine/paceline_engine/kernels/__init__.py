"""What the decoder multiplies, attends and norms with: C++ where it was built, else torch.

Importing this package needs torch; importing ``paceline_engine`` does not.
"""

from paceline_engine.kernels.meta import AttentionMeta
from paceline_engine.kernels.ops import (
    gated_activation,
    linear_bf16,
    linear_fp8,
    linear_fp32,
    linear_int4,
    linear_int8,
    paged_attention,
    residual_norm,
    rms_norm,
    rope_and_cache,
)
from paceline_engine.kernels.packing import pack_fp8, pack_int4, pack_int8
from paceline_engine.kernels.selection import describe
from paceline_engine.kernels.weights import INT4_GROUP, Bf16Weight, Fp8Weight, Int4Weight, Int8Weight

__all__ = [
    "INT4_GROUP",
    "AttentionMeta",
    "Bf16Weight",
    "Fp8Weight",
    "Int4Weight",
    "Int8Weight",
    "describe",
    "gated_activation",
    "linear_bf16",
    "linear_fp8",
    "linear_fp32",
    "linear_int4",
    "linear_int8",
    "pack_fp8",
    "pack_int4",
    "pack_int8",
    "paged_attention",
    "residual_norm",
    "rms_norm",
    "rope_and_cache",
]
