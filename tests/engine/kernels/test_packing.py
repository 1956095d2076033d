"""Rounding to the quantized holders and back."""

import pytest
import torch

from paceline_engine.errors import InvalidValueError
from paceline_engine.kernels import Bf16Weight, pack_fp8, pack_int4, pack_int8
from paceline_engine.kernels.weights import pack_nibbles, unpack_nibbles

PACKS = (pack_int8, pack_fp8, pack_int4)


def error(weight, packed):
    return float((packed.dequantize() - weight).norm() / weight.norm())


@pytest.mark.parametrize(("pack", "limit"), [(pack_int8, 0.009), (pack_fp8, 0.028), (pack_int4, 0.076)])
@pytest.mark.parametrize("k", [640, 650, 33])
def test_round_trip_error(rand, pack, limit, k):
    """Normally distributed weights come back within the precision's usual error."""
    weight = rand(64, k) * 0.02
    assert error(weight, pack(weight)) < limit


def test_int8_error_is_at_most_half_a_step(rand):
    """No int8 weight is off by more than half of its row's step."""
    weight = rand(16, 100)
    packed = pack_int8(weight)
    assert bool(((packed.dequantize() - weight).abs() <= packed.scale[:, None] * 0.5001).all())


def test_int4_search_beats_rounding_to_the_full_range(rand):
    """The clipping search has a smaller squared error than the plain range of each group."""
    weight = rand(64, 640)
    groups = weight.view(64, 20, 32)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (high - low) / 15
    plain = ((groups - low) / step).round() * step + low
    searched = pack_int4(weight).dequantize().view_as(groups)
    assert (searched - groups).square().sum() < 0.95 * (plain - groups).square().sum()


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1e-30, 1e30])
def test_constant_weights(pack, value):
    """Rows that hold one value come back as that value."""
    weight = torch.full((3, 70), value)
    torch.testing.assert_close(pack(weight).dequantize(), weight, rtol=0.01, atol=0)


@pytest.mark.parametrize("pack", PACKS)
def test_subnormal_weights_stay_finite(pack):
    """Weights too small for a normal scale come back finite."""
    assert bool(pack(torch.full((2, 40), 1e-41)).dequantize().isfinite().all())


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(pack, value):
    """NaN or infinity in a checkpoint is an error, never a silent code."""
    weight = torch.ones(3, 40)
    weight[2, 39] = value
    with pytest.raises(InvalidValueError, match="finite"):
        pack(weight)


@pytest.mark.parametrize("pack", [*PACKS, lambda w: Bf16Weight(data=w.bfloat16())])
def test_a_holder_survives_its_tensors(rand, pack):
    """tensors() and from_tensors() rebuild the same weight, and rows are rows of the whole."""
    packed = pack(rand(7, 45))
    again = type(packed).from_tensors(packed.tensors())
    assert again.shape == (7, 45)
    assert again.n_bytes == packed.n_bytes > 0
    assert torch.equal(again.dequantize(), packed.dequantize())
    rows = torch.tensor([6, 0, 6])
    assert torch.equal(packed.dequantize(rows), packed.dequantize()[rows])


def test_nibbles_round_trip():
    """Packing two codes in a byte loses nothing."""
    codes = torch.arange(3 * 2 * 32).view(3, 2, 32).remainder(16).to(torch.uint8)
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)), codes)


def test_a_holder_of_the_wrong_type_is_refused():
    """A fp32 tensor is no Bf16Weight."""
    with pytest.raises(InvalidValueError, match="data"):
        Bf16Weight(data=torch.zeros(2, 3))
