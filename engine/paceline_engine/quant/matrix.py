"""A weight matrix in the precision of one variant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from paceline_engine import kernels
from paceline_engine.kernels import Bf16Weight, Fp8Weight, Int4Weight, Int8Weight
from paceline_engine.kernels.weights import INT4_GROUP
from paceline_engine.mode import Variant


class Matrix(Protocol):
    """A matrix [N, K] that maps K inputs to N outputs."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def n_bytes(self) -> int:
        """Bytes that one pass over the matrix reads."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that make it up, by name."""
        ...

    def dequantize(self, rows: Tensor | None = None) -> Tensor:
        """fp32 values of all rows, or of ``rows`` (int64 indices)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fp32Weight:
    """Plain fp32 values."""

    data: Tensor
    """fp32 [N, K], contiguous."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1]

    @property
    def n_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def tensors(self) -> dict[str, Tensor]:
        return {"data": self.data}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        return cls(**tensors)

    def dequantize(self, rows: Tensor | None = None) -> Tensor:
        return self.data if rows is None else self.data[rows]


def pack(weight: Tensor, variant: Variant) -> Matrix:
    """Round a floating-point matrix [N, K] to the variant's precision."""
    match variant:
        case Variant.FP32:
            return Fp32Weight(data=weight.float().contiguous())
        case Variant.BF16:
            return Bf16Weight(data=weight.to(torch.bfloat16).contiguous())
        case Variant.FP8:
            return kernels.pack_fp8(weight.float())
        case Variant.INT8:
            return kernels.pack_int8(weight.float())
        case Variant.INT4:
            return kernels.pack_int4(weight.float())


def packed_bytes(n_rows: int, n_inputs: int, variant: Variant) -> int:
    """``n_bytes`` of such a matrix, without making it."""
    match variant:
        case Variant.FP32:
            return 4 * n_rows * n_inputs
        case Variant.BF16:
            return 2 * n_rows * n_inputs
        case Variant.FP8 | Variant.INT8:  # a code each, and a scale for each row
            return n_rows * n_inputs + 4 * n_rows
        case Variant.INT4:  # half a byte each, a scale and a minimum for each group, and the width
            n_groups = -(-n_inputs // INT4_GROUP)
            return n_rows * n_groups * (INT4_GROUP // 2 + 4) + 8


def unpack(tensors: Mapping[str, Tensor], variant: Variant) -> Matrix:
    """The matrix of ``variant`` whose ``tensors()`` these were.

    Raises:
        InvalidValueError, TypeError, AttributeError: they are not those of such a matrix.
    """
    holders: dict[Variant, Any] = {
        Variant.FP32: Fp32Weight,
        Variant.BF16: Bf16Weight,
        Variant.FP8: Fp8Weight,
        Variant.INT8: Int8Weight,
        Variant.INT4: Int4Weight,
    }
    matrix: Matrix = holders[variant].from_tensors(tensors)
    return matrix


def select_rows(matrix: Matrix, rows: Tensor) -> Matrix:
    """A copy of some of a matrix's rows (int64 indices), in their order and in its precision."""

    def select(part: Tensor) -> Tensor:
        if part.ndim == 0:
            return part
        if part.dtype == torch.float8_e4m3fn:
            return part.view(torch.uint8)[rows].view(torch.float8_e4m3fn)
        return part[rows]

    holder: Any = type(matrix)
    selected: Matrix = holder.from_tensors({name: select(part) for name, part in matrix.tensors().items()})
    return selected


def to_device(matrix: Matrix, variant: Variant, device: torch.device) -> Matrix:
    """The matrix on ``device``; a size that is a tensor stays here, where reading it waits for nothing."""
    if device.type == "cpu":
        return matrix
    tensors = matrix.tensors().items()
    return unpack({name: part.to(device) if part.ndim else part for name, part in tensors}, variant)
