"""Weight matrices laid out for a GPU's tensor cores, each with its own product.

Products take fp32 rows and give fp32 rows: the residual stream stays fp32, and only what enters a product
is rounded. Sums are fp32 (bf16, FP8 and 4-bit weights) or exact 32-bit integers (int8).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from paceline_engine.kernels import INT4_GROUP, Bf16Weight, Fp8Weight, Int4Weight, Int8Weight
from paceline_engine.kernels.weights import unpack_nibbles

_FP8_MAX = 448.0
_FP8_REST = 16.0
_INT8_MAX = 127.0
_SMALLEST = torch.finfo(torch.float32).tiny
_INT_MM_ROWS = 32
"""``torch._int_mm`` takes more than 16 rows on CUDA; 32 fill a tile, and whole tiles suit every version."""
_TINYGEMM_ROWS = 64
"""Above it the 4-bit product, which unpacks the weights again for every 16 rows, loses to unpacking once."""


@runtime_checkable
class DeviceMatrix(Protocol):
    """A ``quant.matrix.Matrix`` that brings its product with it."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def n_bytes(self) -> int: ...

    def tensors(self) -> dict[str, Tensor]: ...

    def dequantize(self, rows: Tensor | None = None) -> Tensor: ...

    def multiply(self, x: Tensor) -> Tensor:
        """x @ matrix.T for fp32 x [M, K]; fp32 [M, N]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceBf16:
    """bf16 values, and a factor for each row where they are the codes of another precision."""

    data: Tensor
    """bf16 [N, K], contiguous."""
    scale: Tensor | None = None
    """fp32 [N]."""
    wide_output: bool = False
    """Whether the device gives fp32 for bf16 factors without rounding to bf16 between."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1]

    @property
    def n_bytes(self) -> int:
        return _n_bytes(self.tensors())

    def tensors(self) -> dict[str, Tensor]:
        return {"data": self.data} if self.scale is None else {"data": self.data, "scale": self.scale}

    def dequantize(self, rows: Tensor | None = None) -> Tensor:
        data, scale = (
            part if part is None or rows is None else part[rows] for part in (self.data, self.scale)
        )
        assert data is not None
        return data.float() if scale is None else data.float() * scale[..., None]

    def multiply(self, x: Tensor) -> Tensor:
        out = bf16_product(x, self.data, wide_output=self.wide_output)
        return out if self.scale is None else out * self.scale


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceFp8:
    """e4m3fn weights times e4m3fn activations, both with a scale for each row.

    Rounded to e4m3 once, activations cost Gemma 3 270M more than twice the error of the FP8 weights, and the
    perplexity of agent dialogue rises by 1.4 %. So each row brings its rounding error along as a row of its
    own, as for ``DeviceInt8``, which makes about 8 bits, as many as bf16 has. A decode step reads the weights
    once all the same; a prefill multiplies twice, at twice bf16's rate.

    The device multiplies the codes alone; both scales are applied to its fp32 sums. So each row has a scale
    of its own on every device with FP8 units, also on those whose row-wise products are missing in cuBLAS
    (https://github.com/pytorch/pytorch/issues/192707).
    """

    weight: Fp8Weight
    one: Tensor
    """fp32 scalar 1: the scale that the operator asks for."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape

    @property
    def n_bytes(self) -> int:
        return self.weight.n_bytes

    def tensors(self) -> dict[str, Tensor]:
        return self.weight.tensors()

    def dequantize(self, rows: Tensor | None = None) -> Tensor:
        return self.weight.dequantize(rows)

    def multiply(self, x: Tensor) -> Tensor:
        n_rows = x.shape[0]
        step = x.abs().amax(1, keepdim=True).div_(_FP8_MAX).clamp_(min=_SMALLEST)  # [M, 1]
        scaled = (x / step).clamp_(-_FP8_MAX, _FP8_MAX)
        codes = scaled.to(torch.float8_e4m3fn)
        # The largest codes lie 32 apart: what they miss is at most 16, which the factor brings to 256.
        rest = scaled.sub_(codes.float()).mul_(_FP8_REST).to(torch.float8_e4m3fn)
        sums = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
            torch.cat([codes.view(torch.uint8), rest.view(torch.uint8)]).view(torch.float8_e4m3fn),
            self.weight.codes.t(),
            scale_a=self.one,
            scale_b=self.one,
            out_dtype=torch.float32,
        )
        coarse, fine = sums[:n_rows], sums[n_rows:]
        return coarse.add_(fine, alpha=1 / _FP8_REST).mul_(step).mul_(self.weight.scale)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceInt8:
    """int8 weights times int8 activations, with a scale for each row of both.

    Activations have outliers: rounded to 8 bits they cost Gemma 3 270M three times the error of the int8
    weights. So each row brings its rounding error along as a row of its own, which makes about 15 bits. A
    decode step reads the weights once all the same; a prefill multiplies twice, at twice bf16's rate.
    """

    weight: Int8Weight

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape

    @property
    def n_bytes(self) -> int:
        return self.weight.n_bytes

    def tensors(self) -> dict[str, Tensor]:
        return self.weight.tensors()

    def dequantize(self, rows: Tensor | None = None) -> Tensor:
        return self.weight.dequantize(rows)

    def multiply(self, x: Tensor) -> Tensor:
        n_rows = x.shape[0]
        step = x.abs().amax(1, keepdim=True).div_(_INT8_MAX).clamp_(min=_SMALLEST)  # [M, 1]
        codes = (x / step).round_().clamp_(-_INT8_MAX, _INT8_MAX)
        # |x / step - codes| ≤ 1/2, so twice 127 steps of the rest fit in one step of the codes.
        rest = (x / step).sub_(codes).mul_(2 * _INT8_MAX).round_().clamp_(-_INT8_MAX, _INT8_MAX)
        sums = self._sums(torch.cat([codes, rest]))
        coarse, fine = sums[:n_rows], sums[n_rows : 2 * n_rows]
        return coarse.add_(fine, alpha=1 / (2 * _INT8_MAX)).mul_(step).mul_(self.weight.scale)

    def _sums(self, codes: Tensor) -> Tensor:
        """Exact products of whole numbers [M, K] with the weights' codes, fp32 [M or more, N]."""
        missing = -codes.shape[0] % _INT_MM_ROWS
        if missing:
            codes = functional.pad(codes, (0, 0, 0, missing))
        sums = torch._int_mm(codes.to(torch.int8), self.weight.codes.t()).float()  # pyright: ignore[reportPrivateImportUsage]
        return sums[: codes.shape[0] - missing]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceInt4:
    """4-bit weights in the layout of torch's "tinygemm" (``torch._weight_int4pack_mm``), groups of 32.

    Its weights are ``w = scale * (code - 8) + zero`` in bf16, ours ``scale * code + minimum``: so
    ``zero = minimum + 8 * scale``. The storage format is kept beside it, for prefills and for embeddings.
    """

    weight: Int4Weight
    n_inputs: int
    packed: Tensor
    """int32 [N' / 8, K' / (tiles * 16), 32, tiles / 2], N' and K' padded to whole tiles."""
    scale_and_zero: Tensor
    """bf16 [K' / 32, N', 2]"""
    wide_output: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.codes.shape[0], self.n_inputs

    @property
    def n_bytes(self) -> int:
        return _n_bytes({"packed": self.packed, "scale_and_zero": self.scale_and_zero})

    def tensors(self) -> dict[str, Tensor]:
        return self.weight.tensors()

    def dequantize(self, rows: Tensor | None = None) -> Tensor:
        return self._values(rows, torch.float32)

    def multiply(self, x: Tensor) -> Tensor:
        if x.shape[0] > _TINYGEMM_ROWS:
            return bf16_product(x, self._values(None, torch.bfloat16), wide_output=self.wide_output)
        n_padded = self.scale_and_zero.shape[0] * INT4_GROUP
        x = functional.pad(x.to(torch.bfloat16), (0, n_padded - self.n_inputs))
        out = torch._weight_int4pack_mm(x, self.packed, INT4_GROUP, self.scale_and_zero)  # pyright: ignore[reportPrivateImportUsage]
        return out[:, : self.shape[0]].float()

    def _values(self, rows: Tensor | None, dtype: torch.dtype) -> Tensor:
        parts = (self.weight.codes, self.weight.scale, self.weight.minimum)
        codes, scale, minimum = parts if rows is None else (part[rows] for part in parts)
        grouped = unpack_nibbles(codes).to(dtype)  # [..., n_groups, 32]
        values = torch.addcmul(minimum.to(dtype)[..., None], grouped, scale.to(dtype)[..., None])
        return values.flatten(-2)[..., : self.n_inputs]


def bf16_product(x: Tensor, data: Tensor, *, wide_output: bool) -> Tensor:
    """x @ data.T with x rounded to bf16 and fp32 sums; fp32 [M, N]."""
    x = x.to(torch.bfloat16)
    if wide_output:
        return torch.mm(x, data.t(), out_dtype=torch.float32)
    return functional.linear(x, data).float()


def tinygemm_codes(weight: Int4Weight) -> Tensor:
    """uint8 [N', K' / 2] for ``torch._convert_weight_to_int4pack``: the even code in the high half."""
    codes = _pad_rows(unpack_nibbles(weight.codes).flatten(-2))
    return (codes[:, ::2] << 4 | codes[:, 1::2]).contiguous()


def tinygemm_scale_and_zero(weight: Int4Weight) -> Tensor:
    """bf16 [K' / 32, N', 2]"""
    scale = weight.scale.float()
    zero = weight.minimum.float() + 8 * scale
    return _pad_rows(torch.stack([scale, zero], dim=-1)).transpose(0, 1).to(torch.bfloat16).contiguous()


def tinygemm_tiles(weight: Int4Weight) -> int:
    """The largest number of inner tiles of 16 that divides K'."""
    n_padded = weight.codes.shape[1] * 2
    return next(tiles for tiles in (8, 4, 2) if n_padded % (tiles * 16) == 0)


def widen(weight: Bf16Weight | Fp8Weight | Int8Weight | Int4Weight, *, wide_output: bool) -> DeviceBf16:
    """bf16 in the weight's place, for devices without units for it: as fast as bf16, and never slower.

    Codes of FP8 and int8 are exact in bf16; 4-bit weights are rounded to it.
    """
    match weight:
        case Bf16Weight():
            return DeviceBf16(data=weight.data, wide_output=wide_output)
        case Fp8Weight() | Int8Weight():
            data = weight.codes.to(torch.bfloat16)
            return DeviceBf16(data=data, scale=weight.scale, wide_output=wide_output)
        case Int4Weight():
            return DeviceBf16(data=weight.dequantize().to(torch.bfloat16), wide_output=wide_output)


def _pad_rows(tensor: Tensor) -> Tensor:
    missing = -tensor.shape[0] % 8
    return functional.pad(tensor, (*(0, 0) * (tensor.ndim - 1), 0, missing)) if missing else tensor


def _n_bytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
