"""What a GPU does right, found by trying it once, and the matrices that suit it.

Operators differ by compute capability, by CUDA and by torch; a table of versions would be wrong for the next
one. Each is run on small inputs and compared with plain torch; one that raises or differs is not used.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline_engine.cuda import matrices
from paceline_engine.cuda.attention import FLASH_HEAD_DIM, flash_attention, masked_attention
from paceline_engine.cuda.matrices import DeviceBf16, DeviceFp8, DeviceInt4, DeviceInt8
from paceline_engine.kernels import Bf16Weight, Fp8Weight, Int4Weight, Int8Weight
from paceline_engine.kernels.packing import pack_fp8, pack_int4, pack_int8
from paceline_engine.mode import Variant
from paceline_engine.quant.matrix import Matrix, to_device

_LOG = logging.getLogger(__name__)
_ROWS, _INPUTS, _OUTPUTS = (1, 3, 24, 80), 256, 128
_CONTEXT = 1024
_TOLERANCE = {"wide_output": 0.02, "fp8": 0.12, "int8": 0.03, "int4": 0.03, "flash": 0.03}
"""Largest root mean square error of each, as a share of the reference's."""
_FP8_MULTIPLE, _INT8_MULTIPLE = 16, 8
"""What K and N must be multiples of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """Which operators are used; all off is right everywhere."""

    wide_output: bool = False
    """bf16 factors, fp32 product."""
    fp8: bool = False
    int8: bool = False
    int4: bool = False
    flash: bool = False
    """Flash attention over sequences of unequal length."""

    @classmethod
    def probe(cls, device: torch.device) -> Support:
        """Try each operator on ``device``."""
        bf16, fp8, int8, int4 = _samples(device)
        return cls(
            wide_output=_is_right("wide_output", lambda: _errors(bf16, cls(wide_output=True), device)),
            fp8=_is_right("fp8", lambda: _errors(fp8, cls(fp8=True), device)),
            int8=_is_right("int8", lambda: _errors(int8, cls(int8=True), device)),
            int4=_is_right("int4", lambda: _errors(int4, cls(int4=True), device)),
            flash=_is_right("flash", lambda: _flash_errors(device)),
        )


def place(matrix: Matrix, support: Support) -> Matrix:
    """``matrix``, already on its device, in the layout that the device multiplies fastest."""
    match matrix:
        case Bf16Weight():
            return DeviceBf16(data=matrix.data, wide_output=support.wide_output)
        case Fp8Weight() if support.fp8 and _divides(matrix, _FP8_MULTIPLE):
            return DeviceFp8(weight=matrix, one=torch.ones((), device=matrix.codes.device))
        case Int8Weight() if support.int8 and _divides(matrix, _INT8_MULTIPLE):
            return DeviceInt8(weight=matrix)
        case Int4Weight() if support.int4:
            codes, tiles = matrices.tinygemm_codes(matrix), matrices.tinygemm_tiles(matrix)
            return DeviceInt4(
                weight=matrix,
                n_inputs=matrix.shape[1],
                packed=torch._convert_weight_to_int4pack(codes, tiles),  # pyright: ignore[reportPrivateImportUsage]
                scale_and_zero=matrices.tinygemm_scale_and_zero(matrix),
                wide_output=support.wide_output,
            )
        case Fp8Weight() | Int8Weight() | Int4Weight():
            return matrices.widen(matrix, wide_output=support.wide_output)
        case _:
            return matrix


def _divides(matrix: Fp8Weight | Int8Weight, multiple: int) -> bool:
    return all(size % multiple == 0 for size in matrix.shape)


def _samples(device: torch.device) -> tuple[Matrix, Matrix, Matrix, Matrix]:
    """A small random matrix of each precision, bf16 first."""
    values = torch.randn((_OUTPUTS, _INPUTS), generator=torch.Generator().manual_seed(1)) + 0.3
    bf16, fp8, int8, int4 = (
        to_device(matrix, variant, device)
        for matrix, variant in (
            (Bf16Weight(data=values.bfloat16()), Variant.BF16),
            (pack_fp8(values), Variant.FP8),
            (pack_int8(values), Variant.INT8),
            (pack_int4(values), Variant.INT4),
        )
    )
    return bf16, fp8, int8, int4


def _errors(matrix: Matrix, support: Support, device: torch.device) -> list[float]:
    """Relative error of the product for each number of rows."""
    placed = place(matrix, support)
    assert isinstance(placed, matrices.DeviceMatrix)
    generator = torch.Generator().manual_seed(2)
    weights = matrix.dequantize().cpu()
    found: list[float] = []
    for n_rows in _ROWS:
        x = torch.randn((n_rows, _INPUTS), generator=generator)
        found.append(_relative(placed.multiply(x.to(device)).cpu(), x @ weights.T))
    return found


def _flash_errors(device: torch.device) -> list[float]:
    """Relative error against masked attention: a decode and a chunk, full and with a window, narrow heads and
    the widest, over a context that is long enough to be split."""
    generator = torch.Generator().manual_seed(3)
    used = torch.tensor([_CONTEXT - 7, 20], dtype=torch.int32, device=device)
    found: list[float] = []
    for n_rows, head_dim in itertools.product((1, 7), (64, FLASH_HEAD_DIM)):
        keys, values = (
            torch.randn((2 * _CONTEXT, 2, head_dim), generator=generator).to(device, torch.bfloat16)
            for _ in range(2)
        )
        q = torch.randn((2 * n_rows, 4, head_dim), generator=generator).to(device, torch.bfloat16)
        first = used.long() - n_rows
        for window in (None, 9):
            results = [
                attend(q, keys, values, used, first, n_rows=n_rows, scale=0.1, window=window)
                for attend in (flash_attention, masked_attention)
            ]
            found.append(_relative(*(result.float().cpu() for result in results)))
    return found


def _is_right(name: str, errors: Callable[[], list[float]]) -> bool:
    try:
        with torch.inference_mode():
            worst = float(torch.tensor(errors()).max())  # a NaN stays one, and is not right
    except (RuntimeError, TypeError, ValueError, ImportError, AttributeError) as error:
        _LOG.info("%s is not used on this device: %s", name, str(error).partition("\n")[0])
        return False
    right = worst <= _TOLERANCE[name]
    if not right:
        _LOG.warning("%s is not used: it differs from its reference by %.3g on this device", name, worst)
    return right


def _relative(result: Tensor, reference: Tensor) -> float:
    return float((result - reference).square().mean().sqrt() / reference.square().mean().sqrt())
