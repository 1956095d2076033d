"""Weight matrices in the precisions that the kernels multiply, each with its own little storage format.

Rows are outputs: a weight of shape [N, K] maps K inputs to N outputs. Every holder can be taken apart into
plain tensors and put together again, so that a disk cache can save it as safetensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from paceline_engine.errors import InvalidValueError

INT4_GROUP = 32
"""Weights along K that share one scale and one minimum in ``Int4Weight``."""


class _Holder:
    """What the holders share; each field that is a tensor is part of the weight."""

    __slots__ = ()

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that make up the weight, by name."""
        fields: dict[str, object] = getattr(type(self), "__dataclass_fields__")  # noqa: B009
        return {name: getattr(self, name) for name in fields}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """The weight whose ``tensors()`` these were."""
        return cls(**tensors)

    @property
    def n_bytes(self) -> int:
        """Bytes that one pass over the weight reads."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bf16Weight(_Holder):
    """bfloat16 values, widened to fp32 when multiplied."""

    data: Tensor
    """bf16 [N, K], contiguous."""

    def __post_init__(self) -> None:
        _check("data", self.data, torch.bfloat16, 2)

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1]

    def dequantize(self, rows: Tensor | None = None) -> Tensor:
        """fp32 values of all rows, or of ``rows`` (int64 indices)."""
        return (self.data if rows is None else self.data[rows]).float()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Int8Weight(_Holder):
    """Symmetric int8 with one scale for each output row: ``w = scale * code``, codes within ±127."""

    codes: Tensor
    """int8 [N, K], contiguous."""
    scale: Tensor
    """fp32 [N]."""

    def __post_init__(self) -> None:
        _check("codes", self.codes, torch.int8, 2)
        _check("scale", self.scale, torch.float32, 1)

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self, rows: Tensor | None = None) -> Tensor:
        """fp32 values of all rows, or of ``rows`` (int64 indices)."""
        codes, scale = (self.codes, self.scale) if rows is None else (self.codes[rows], self.scale[rows])
        return codes.float() * scale[..., None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fp8Weight(_Holder):
    """e4m3fn (Micikevicius et al., 2022) with one scale for each output row: ``w = scale * code``."""

    codes: Tensor
    """float8_e4m3fn [N, K], contiguous."""
    scale: Tensor
    """fp32 [N]."""

    def __post_init__(self) -> None:
        _check("codes", self.codes, torch.float8_e4m3fn, 2)
        _check("scale", self.scale, torch.float32, 1)

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self, rows: Tensor | None = None) -> Tensor:
        """fp32 values of all rows, or of ``rows`` (int64 indices)."""
        if rows is None:
            return self.codes.float() * self.scale[:, None]
        codes = self.codes.view(torch.uint8)[rows].view(torch.float8_e4m3fn)
        return codes.float() * self.scale[rows][..., None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Int4Weight(_Holder):
    """Asymmetric 4-bit in groups of 32 along K: ``w = scale * code + minimum``, codes 0 to 15.

    Byte j of a group's 16 holds code j in its low half and code j + 16 in its high half. K is padded to
    whole groups; what the padding holds is never multiplied by anything but zero.
    """

    codes: Tensor
    """uint8 [N, n_groups * 16], contiguous."""
    scale: Tensor
    """bf16 [N, n_groups]."""
    minimum: Tensor
    """bf16 [N, n_groups]."""
    n_inputs: Tensor
    """int64 scalar: K, which the padding hides."""

    def __post_init__(self) -> None:
        _check("codes", self.codes, torch.uint8, 2)
        _check("scale", self.scale, torch.bfloat16, 2)
        _check("minimum", self.minimum, torch.bfloat16, 2)

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], int(self.n_inputs)

    def dequantize(self, rows: Tensor | None = None) -> Tensor:
        """fp32 values of all rows, or of ``rows`` (int64 indices)."""
        parts = (self.codes, self.scale, self.minimum)
        codes, scale, minimum = parts if rows is None else (part[rows] for part in parts)
        grouped = unpack_nibbles(codes).float()  # [..., n_groups, 32]
        values = torch.addcmul(minimum.float()[..., None], grouped, scale.float()[..., None])
        return values.flatten(-2)[..., : int(self.n_inputs)]


def unpack_nibbles(codes: Tensor) -> Tensor:
    """uint8 [..., n_groups * 16] to the codes in their order, uint8 [..., n_groups, 32]."""
    grouped = codes.view(*codes.shape[:-1], codes.shape[-1] * 2 // INT4_GROUP, INT4_GROUP // 2)
    return torch.cat([grouped & 0xF, grouped >> 4], dim=-1)


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 [..., n_groups, 32] with values 0 to 15 to [..., n_groups * 16]; undoes ``unpack_nibbles``."""
    low, high = codes[..., : INT4_GROUP // 2], codes[..., INT4_GROUP // 2 :]
    return (low | (high << 4)).flatten(-2)


def _check(name: str, tensor: Tensor, dtype: torch.dtype, n_dims: int) -> None:
    if tensor.dtype != dtype or tensor.ndim != n_dims or not tensor.is_contiguous():
        raise InvalidValueError(
            name,
            observed=f"{tensor.dtype} {list(tensor.shape)}",
            limit=f"contiguous {dtype} with {n_dims} dimensions",
            remedy="convert the tensor before building the weight",
        )
