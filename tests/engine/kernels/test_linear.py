"""Matrix products: native against torch, over shapes, values, rows and threads."""

import pytest
import torch

from paceline_engine.errors import InvalidValueError
from paceline_engine.kernels import (
    Bf16Weight,
    Fp8Weight,
    fallback,
    linear_bf16,
    linear_int8,
    pack_fp8,
    pack_int4,
    pack_int8,
)

NAMES = ("linear_fp32", "linear_bf16", "linear_fp8", "linear_int8", "linear_int4")
PACK = {
    "linear_fp32": lambda w: w,
    "linear_bf16": lambda w: w.bfloat16(),
    "linear_fp8": pack_fp8,
    "linear_int8": pack_int8,
    "linear_int4": pack_int4,
}
SHAPES = [(1, 1), (3, 7), (5, 31), (4, 32), (13, 33), (2, 64), (9, 100), (33, 195), (6, 640), (1, 1027)]


def close(result, reference):
    torch.testing.assert_close(result, reference, rtol=2e-5, atol=2e-5 * float(reference.abs().max() + 1e-30))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_native_equals_fallback(native, rand, name, n, k):
    """Any N, K and M give the fallback's values within rounding."""
    w = PACK[name](rand(n, k))
    for m in (1, 2, 3, 4, 5, 6, 7, 9, 16, 47, 48, 49, 70):
        x = rand(m, k)
        close(getattr(native, name)(x, w), getattr(fallback, name)(x, w))


@pytest.mark.parametrize("name", NAMES)
def test_empty_inputs(kernels, rand, name):
    """No rows give no rows, and no inputs give zeros."""
    assert getattr(kernels, name)(rand(0, 40), PACK[name](rand(3, 40))).shape == (0, 3)
    assert getattr(kernels, name)(rand(2, 40), PACK[name](rand(0, 40))).shape == (2, 0)
    if name != "linear_int4":
        result = getattr(kernels, name)(rand(2, 0), PACK[name](rand(3, 0)))
        assert torch.equal(result, torch.zeros(2, 3))


@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_the_same_bits_in_every_batch(native, rand, name):
    """A row alone gives the same bits as among 1 to 70 others, wherever it stands."""
    w, x = PACK[name](rand(37, 331)), rand(70, 331)
    alone = torch.cat([getattr(native, name)(row[None], w) for row in x])
    for m in (2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 48, 49, 70):
        assert torch.equal(getattr(native, name)(x[:m], w), alone[:m])
    assert torch.equal(getattr(native, name)(x.flip(0), w), alone.flip(0))


@pytest.mark.parametrize("name", NAMES)
def test_threads_do_not_change_bits(native, rand, name):
    """One, two and three threads give the same bits."""
    w, x = PACK[name](rand(211, 640)), rand(19, 640)
    torch.set_num_threads(1)
    alone = getattr(native, name)(x, w)
    for n_threads in (2, 3):
        torch.set_num_threads(n_threads)
        assert torch.equal(getattr(native, name)(x, w), alone)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("factor", [1e-30, 1e-20, 1e20, 1e30])
def test_extreme_scales_of_the_activations(kernels, rand, name, factor):
    """Very small and very large rows keep their relative precision."""
    w, x = PACK[name](rand(9, 70)), rand(5, 70)
    unit = getattr(kernels, name)(x, w)
    close(getattr(kernels, name)(x * factor, w) / factor, unit)


@pytest.mark.parametrize("name", NAMES)
def test_nan_and_infinity_stay_in_their_row(kernels, rand, name):
    """A bad value spoils its own row, as in the fallback, and no other."""
    w, x = PACK[name](rand(9, 70)), rand(6, 70)
    clean = getattr(kernels, name)(x, w)
    x[1, 3], x[4, 69] = float("nan"), float("inf")
    result, reference = getattr(kernels, name)(x, w), getattr(fallback, name)(x, w)
    assert not result[1].isfinite().any()
    assert not result[4].isfinite().any()
    assert torch.equal(result[[0, 2, 3, 5]], clean[[0, 2, 3, 5]])
    assert torch.equal(result.isnan(), reference.isnan())


@pytest.mark.parametrize("name", ["linear_int8", "linear_int4"])
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-39, -1e-39])
def test_rows_next_to_zero_give_zeros(native, rand, name, value):
    """Rows of zeros or subnormal numbers give zeros, not NaN."""
    w = PACK[name](rand(5, 64))
    x = torch.full((3, 64), value)
    assert torch.equal(getattr(native, name)(x, w), torch.zeros(3, 5))
    assert torch.equal(getattr(fallback, name)(x, w), torch.zeros(3, 5))


def test_int8_sums_are_exact_at_the_largest_codes(native):
    """With all codes at their limit the 32-bit sums do not wrap, whatever K is."""
    for k in (1, 640, 2048, 16384, 60000):
        w = pack_int8(torch.ones(5, k))
        for m in (1, 5):
            result = native.linear_int8(torch.ones(m, k), w)
            torch.testing.assert_close(result, torch.full((m, 5), float(k)), rtol=1e-6, atol=0)
            result = native.linear_int8(-torch.ones(m, k), w)
            torch.testing.assert_close(result, torch.full((m, 5), -float(k)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["linear_int8", "linear_int4"])
def test_rounding_the_activations_costs_next_to_nothing(kernels, rand, name):
    """A row with an outlier 100 times its typical size stays within 0.2% of unrounded activations."""
    weight, x = PACK[name](rand(64, 640)), rand(8, 640)
    x[:, 17] *= 100
    exact = x @ weight.dequantize().T
    assert (getattr(kernels, name)(x, weight) - exact).norm() / exact.norm() < 2e-3


def test_every_fp8_code_converts_exactly(kernels):
    """All 256 codes, subnormals and both NaNs included, are widened to torch's own values."""
    codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
    for k in (1, 7, 8, 16, 32, 33, 64, 100):
        data = codes.view(torch.uint8)[:, None].repeat(1, k).view(torch.float8_e4m3fn)
        w = Fp8Weight(codes=data, scale=torch.ones(256))
        for column in range(0, k, 5):
            x = torch.zeros(5, k)
            x[:, column] = 1.0
            for m in (1, 5):
                result = kernels.linear_fp8(x[:m], w)
                torch.testing.assert_close(
                    result, codes.float().expand(m, 256), rtol=0, atol=0, equal_nan=True
                )


def test_fp8_survives_flushing_of_subnormals(kernels):
    """Code 1 (2^-9) is widened exactly where the caller has subnormal fp32 flushed to zero."""
    w = Fp8Weight(
        codes=torch.full((4, 64), 1, dtype=torch.uint8).view(torch.float8_e4m3fn), scale=torch.ones(4)
    )
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        assert torch.equal(kernels.linear_fp8(torch.ones(1, 64), w), torch.full((1, 4), 64 * 2.0**-9))
    finally:
        torch.set_flush_denormal(False)


def test_bf16_takes_a_tensor_or_a_holder(rand):
    """A bare bf16 tensor and a Bf16Weight give the same product."""
    w, x = rand(5, 40).bfloat16(), rand(3, 40)
    assert torch.equal(linear_bf16(x, w), linear_bf16(x, Bf16Weight(data=w)))


def test_rows_that_are_not_contiguous(rand):
    """A strided view of x gives what its copy gives."""
    w, x = pack_int8(rand(5, 40)), rand(3, 80)[:, ::2]
    assert torch.equal(linear_int8(x, w), linear_int8(x.contiguous(), w))


@pytest.mark.parametrize("x", [torch.zeros(2, 39), torch.zeros(40), torch.zeros(2, 40, dtype=torch.float64)])
def test_a_wrong_input_is_refused(rand, x):
    """The wrong width, dimension or type is an error that names x, not a read past the end."""
    with pytest.raises(InvalidValueError, match="x must be fp32"):
        linear_int8(x, pack_int8(rand(5, 40)))
