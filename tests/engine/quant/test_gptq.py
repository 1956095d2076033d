"""Rounding that makes up for its own errors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline_engine.kernels import pack_fp8, pack_int4, pack_int8
from paceline_engine.quant.gptq import gptq_fp8, gptq_int4, gptq_int8

EACH = pytest.mark.parametrize(
    ("gptq", "plain"), [(gptq_int4, pack_int4), (gptq_fp8, pack_fp8), (gptq_int8, pack_int8)]
)


def inputs_that_move_together(n: int, size: int) -> Tensor:
    """fp32 [n, size], made of a few directions and a little of each input's own."""
    generator = torch.Generator().manual_seed(7)
    directions = torch.randn(size // 4, size, generator=generator)
    return torch.randn(n, size // 4, generator=generator) @ directions + 0.3 * torch.randn(
        n, size, generator=generator
    )


def weight_of(n_rows: int, size: int) -> Tensor:
    return torch.randn(n_rows, size, generator=torch.Generator().manual_seed(8))


@EACH
def test_outputs_are_nearer_than_with_plain_rounding(gptq, plain) -> None:
    """On unseen inputs of the same kind the outputs' error is well below that of nearest rounding."""
    x = inputs_that_move_together(600, 96)
    seen, unseen = x[:400], x[400:]
    weight = weight_of(40, 96)

    def error(rounded: Tensor) -> float:
        return float((unseen @ (rounded - weight).T).square().mean())

    assert error(gptq(weight, seen.T @ seen).dequantize()) < 0.6 * error(plain(weight).dequantize())


@EACH
def test_rows_are_rounded_apart(gptq, plain) -> None:
    """A row's codes do not depend on the rows beside it, but for ties: stacking changes next to nothing."""
    x = inputs_that_move_together(300, 64)
    weight = weight_of(24, 64)
    whole = gptq(weight, x.T @ x).dequantize()
    parts = [gptq(part, x.T @ x).dequantize() for part in weight.split([10, 14])]
    assert float((torch.cat(parts) != whole).float().mean()) < 0.02


@EACH
def test_inputs_that_never_move_are_rounded_plainly(gptq, plain) -> None:
    """Without any input seen, every weight still lies within a step of its value."""
    weight = weight_of(6, 40)
    rounded = gptq(weight, torch.zeros(40, 40)).dequantize()
    assert rounded.shape == weight.shape
    assert float((rounded - weight).abs().max()) <= 1.5 * float(
        (plain(weight).dequantize() - weight).abs().max()
    )


@EACH
def test_any_width_is_rounded(gptq, plain) -> None:
    """Widths that are no multiple of a group, and a matrix without rows, keep their shapes."""
    for n_rows, size in ((3, 33), (5, 7), (0, 64), (1, 1)):
        x = inputs_that_move_together(50, max(size, 4))[:, :size]
        assert gptq(weight_of(n_rows, size), x.T @ x).shape == (n_rows, size)


def test_rows_of_zeros_stay_zeros() -> None:
    """A row of zeros has no scale to divide by and comes back as it was."""
    x = inputs_that_move_together(100, 64)
    for gptq in (gptq_int4, gptq_fp8, gptq_int8):
        assert not gptq(torch.zeros(2, 64), x.T @ x).dequantize().any()
