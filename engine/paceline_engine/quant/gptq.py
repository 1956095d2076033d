"""Rounding that makes up for its own errors: GPTQ (Frantar et al., 2022, https://arxiv.org/abs/2210.17323).

Columns are rounded one after the other, those with the largest inputs first; the error that a column's
rounding makes in the outputs is taken up, as far as inputs move together, by the columns that are not
rounded yet. What moves together is known from the second moment H of the inputs, xᵀx.

With H = A D Aᵀ, A unit upper triangular and D diagonal, errors e of a row cost eᵀHe, which is the sum over
columns j of Dⱼ (eⱼ + Σᵢ Aᵢⱼ eᵢ)², i < j. So column j is rounded as wⱼ + Σᵢ Aᵢⱼ eᵢ: the same codes as with the
inverse of H, which is not needed (Chee et al., 2023, https://arxiv.org/abs/2307.13304).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline_engine.kernels import Fp8Weight, Int4Weight, Int8Weight
from paceline_engine.kernels.packing import FP8_MAX, nonzero, row_peak, search_int4
from paceline_engine.kernels.weights import INT4_GROUP, pack_nibbles

DAMPING = 0.01
"""Of the mean diagonal, added to the diagonal: for inputs that the sample hardly moves."""
_ROWS = 8192
"""Rows of a weight rounded together."""
_SEARCH_ROWS = 1024
_CLIPS = (0.95, 0.85, 0.75)
"""Shares of a group's range to try: fewer than without the making up that follows."""
_COLUMNS = 32
"""Columns whose errors reach the others in one product."""

_Round = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""Values of one column [rows] and the column's number to its codes and the values that they stand for."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Inputs:
    """What the second moment says of a matrix's inputs."""

    order: Tensor
    """int64 [K]: columns, the largest inputs first."""
    feedback: Tensor
    """fp32 [K, K] in that order: A, what of a row's error the column takes up."""
    importance: Tensor
    """fp32 [K]: mean square of each input."""

    @classmethod
    def of(cls, moment: Tensor) -> _Inputs:
        diagonal = moment.diagonal()
        mean = float(diagonal.mean()) or 1.0
        importance = diagonal + DAMPING * mean
        # The last column first: the lower factor of H backwards is an upper one of H.
        order = torch.argsort(diagonal, descending=True)
        backwards = order.flip(0)
        damped = moment[backwards][:, backwards]
        damped.diagonal().add_(DAMPING * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if int(failed):
            lower = torch.linalg.cholesky(damped.double()).float()
        upper = lower.flip(0, 1)
        return cls(order=order, feedback=upper.div_(upper.diagonal().clone()), importance=importance)


def gptq_int4(weight: Tensor, moment: Tensor) -> Int4Weight:
    """Round [N, K] to 4 bits in groups of 32, as ``pack_int4``, for inputs of this second moment [K, K].

    The weight is floating-point and finite. Scales and minimums are searched for before any column is
    rounded, each column's error weighted by the mean square of its input.
    """
    inputs = _Inputs.of(moment)
    n_rows, n_inputs = weight.shape
    n_groups = -(-n_inputs // INT4_GROUP)
    padding = n_groups * INT4_GROUP - n_inputs
    importance = torch.nn.functional.pad(inputs.importance, (0, padding)).view(n_groups, INT4_GROUP)
    codes = torch.zeros((n_rows, n_groups * INT4_GROUP), dtype=torch.uint8)
    scale = torch.empty((n_rows, n_groups), dtype=torch.bfloat16)
    minimum = torch.empty((n_rows, n_groups), dtype=torch.bfloat16)
    for start in range(0, n_rows, _SEARCH_ROWS):
        rows = slice(start, start + _SEARCH_ROWS)
        part = weight[rows].float()
        part = torch.cat([part, part[:, -1:].expand(-1, padding)], dim=1)
        scale[rows], minimum[rows] = search_int4(
            part.view(-1, n_groups, INT4_GROUP), importance, clips=_CLIPS
        )
    for start in range(0, n_rows, _ROWS):
        rows = slice(start, start + _ROWS)
        steps, bases = (each[rows].T.float().contiguous() for each in (scale, minimum))  # [n_groups, rows]
        divisors = nonzero(steps)

        def to_grid(values: Tensor, column: int) -> tuple[Tensor, Tensor]:
            group = column // INT4_GROUP
            rounded = (values - bases[group]).div_(divisors[group]).round_().clamp_(0, 15)  # noqa: B023
            return rounded, torch.addcmul(bases[group], rounded, steps[group])  # noqa: B023

        codes[rows, :n_inputs] = _round_rows(weight[rows], inputs, to_grid, torch.uint8)
    packed = pack_nibbles(codes.view(n_rows, n_groups, INT4_GROUP))
    return Int4Weight(codes=packed, scale=scale, minimum=minimum, n_inputs=torch.tensor(n_inputs))


def gptq_int8(weight: Tensor, moment: Tensor) -> Int8Weight:
    """Round [N, K] to int8 with one scale for each row, for inputs of this second moment [K, K].

    The weight is floating-point and finite.
    """

    def to_grid(scaled: Tensor) -> tuple[Tensor, Tensor]:
        rounded = scaled.round_().clamp_(-127, 127)
        return rounded, rounded

    codes, scale = _round_by_row(weight, moment, to_grid, peak=127.0, dtype=torch.int8)
    return Int8Weight(codes=codes, scale=scale)


def gptq_fp8(weight: Tensor, moment: Tensor) -> Fp8Weight:
    """Round [N, K] to e4m3fn with one scale for each row, for inputs of this second moment [K, K].

    The weight is floating-point and finite.
    """

    def to_grid(scaled: Tensor) -> tuple[Tensor, Tensor]:
        rounded = scaled.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        return rounded.view(torch.uint8), rounded.float()

    codes, scale = _round_by_row(weight, moment, to_grid, peak=FP8_MAX, dtype=torch.uint8)
    return Fp8Weight(codes=codes.view(torch.float8_e4m3fn), scale=scale)


def _round_by_row(
    weight: Tensor,
    moment: Tensor,
    to_grid: Callable[[Tensor], tuple[Tensor, Tensor]],
    *,
    peak: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """(codes [N, K], scale [N]) of a weight whose largest value in each row becomes ``peak``.

    Args:
        to_grid: the codes of scaled values, and what these stand for.
    """
    inputs = _Inputs.of(moment)
    codes = torch.empty(weight.shape, dtype=dtype)
    scale = torch.empty(weight.shape[0])
    for start in range(0, weight.shape[0], _ROWS):
        rows = slice(start, start + _ROWS)
        step = row_peak(weight[rows].float()) / peak
        divisor = nonzero(step)

        def rounded(values: Tensor, _: int) -> tuple[Tensor, Tensor]:
            found, meant = to_grid(values / divisor)  # noqa: B023
            return found, meant * step  # noqa: B023

        codes[rows] = _round_rows(weight[rows], inputs, rounded, dtype)
        scale[rows] = step
    return codes, scale


def _round_rows(weight: Tensor, inputs: _Inputs, to_grid: _Round, dtype: torch.dtype) -> Tensor:
    """Codes [rows, K] of some rows of a weight, each independent of the others."""
    n_rows, n_inputs = weight.shape
    columns: list[int] = inputs.order.tolist()
    # [K, rows]: errors of the columns that are rounded, values of the others
    held = torch.empty((n_inputs, n_rows)).copy_(weight.float().T)[inputs.order]
    codes = torch.empty((n_inputs, n_rows), dtype=dtype)
    for first in range(0, n_inputs, _COLUMNS):
        end = min(first + _COLUMNS, n_inputs)
        wanted = torch.addmm(held[first:end], inputs.feedback[:first, first:end].T, held[:first])
        for index in range(first, end):
            rounded, values = to_grid(wanted[index - first], columns[index])
            codes[columns[index]] = rounded
            error = held[index].sub_(values)
            if index + 1 < end:
                wanted[index + 1 - first :].addr_(inputs.feedback[index, index + 1 : end], error)
    return codes.T
