"""Products in a GPU's layouts, run on CPU tensors and held against the stored weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline_engine.cuda import matrices
from paceline_engine.cuda.matrices import DeviceFp8, DeviceInt4, DeviceInt8
from paceline_engine.cuda.support import Support, place
from paceline_engine.kernels import INT4_GROUP, Bf16Weight, Fp8Weight, Int4Weight, Int8Weight
from paceline_engine.kernels.packing import pack_fp8, pack_int4, pack_int8

ROWS = [1, 5, 16, 17, 40]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())


@pytest.mark.parametrize("n_rows", ROWS)
def test_int8_products_are_near_those_of_the_stored_weights(n_rows: int) -> None:
    """Activations keep about 15 bits, whatever the number of rows and their sizes."""
    weight = pack_int8(random(48, 64))
    x = random(n_rows, 64, seed=1) * torch.logspace(-3, 3, n_rows)[:, None]
    found = DeviceInt8(weight=weight).multiply(x)
    error = relative(
        found / x.abs().amax(1, keepdim=True), x @ weight.dequantize().T / x.abs().amax(1, keepdim=True)
    )
    assert found.dtype == torch.float32
    assert error < 1e-4


def test_int8_sums_stay_exact_where_every_code_is_at_its_limit() -> None:
    """Rows that reach ±127 everywhere give the exact product, zeros give zeros, NaN stays in its row."""
    weight = Int8Weight(codes=torch.full((8, 512), 127, dtype=torch.int8), scale=torch.ones(8))
    x = torch.ones(3, 512)
    x[1], x[2, 3] = 0.0, math.nan
    found = DeviceInt8(weight=weight).multiply(x)
    torch.testing.assert_close(found[0], torch.full((8,), 127.0 * 512))
    assert not found[1].any()
    assert found[2].isnan().all()


@pytest.mark.parametrize("n_rows", ROWS)
def test_fp8_products_carry_a_scale_for_each_row(n_rows: int) -> None:
    """Rows of very different size are each as exact as with activations in bf16, whose 8 bits they keep."""
    weight = pack_fp8(random(32, 64) * torch.logspace(-2, 2, 32)[:, None])
    sizes = torch.logspace(-4, 4, n_rows)[:, None]
    x = random(n_rows, 64, seed=2) * sizes
    found = DeviceFp8(weight=weight, one=torch.ones(())).multiply(x)
    expected = x @ weight.dequantize().T
    norm = sizes * weight.scale
    assert relative(found / norm, expected / norm) < 2e-3


@pytest.mark.parametrize("shape", [(16, 128), (13, 96), (24, 64), (8, 33)])
def test_int4_layout_holds_the_stored_weights(shape: tuple[int, int]) -> None:
    """Read by tinygemm's formula, packed codes, scales and zeros are the stored weights, rounded to bf16."""
    weight = pack_int4(random(*shape) + 0.2)
    codes = matrices.tinygemm_codes(weight)
    scale, zero = matrices.tinygemm_scale_and_zero(weight).float().unbind(-1)  # [groups, N']
    unpacked = torch.stack([codes >> 4, codes & 0xF], dim=-1).flatten(-2).float() - 8  # [N', K']
    each = [part.T.repeat_interleave(INT4_GROUP, dim=1) for part in (scale, zero)]
    values = unpacked * each[0] + each[1]
    assert codes.shape == (-(-shape[0] // 8) * 8, weight.codes.shape[1])
    assert weight.codes.shape[1] * 2 % (16 * matrices.tinygemm_tiles(weight)) == 0
    error = (values[: shape[0], : shape[1]] - weight.dequantize()).abs().max()
    assert error < 2**-8 * zero.abs().max()


@pytest.mark.parametrize(("offset", "size"), [(0.0, 1.0), (3.0, 0.01), (-0.2, 50.0), (0.0, 1e-4)])
def test_every_int4_value_is_the_stored_one_within_bf16(offset: float, size: float) -> None:
    """tinygemm's multiply-add of code - 8, scale and zero errs by the rounding of the zero and its own."""
    weight = pack_int4(random(40, 96, seed=7) * size + offset * size)
    codes = matrices.tinygemm_codes(weight)
    unpacked = torch.stack([codes >> 4, codes & 0xF], dim=-1).flatten(-2).double() - 8
    scale, zero = matrices.tinygemm_scale_and_zero(weight).double().unbind(-1)  # [groups, N]
    scale, zero = (part.T.repeat_interleave(INT4_GROUP, dim=1) for part in (scale, zero))
    found = torch.addcmul(zero, unpacked, scale).bfloat16().double()
    exact = weight.dequantize().double()
    limit = 2**-8 * (zero.abs() + exact.abs()) * 1.01
    assert bool(((found - exact).abs() <= limit).all())


def test_int4_layout_agrees_with_torchs_own_operator() -> None:
    """torch's CPU form of the operator, given our scales and zeros, gives the stored weights' product."""
    weight = pack_int4(random(64, 128) + 0.2)
    codes = matrices.tinygemm_codes(weight)
    plain = torch.stack([codes >> 4, codes & 0xF], dim=-1).flatten(-2).int()
    packed = torch._convert_weight_to_int4pack_for_cpu(plain, 2)
    x = random(3, 128, seed=4).bfloat16()
    found = torch._weight_int4pack_mm_for_cpu(x, packed, INT4_GROUP, matrices.tinygemm_scale_and_zero(weight))
    assert relative(found.float(), x.float() @ weight.dequantize().T) < 0.01


def test_int4_prefill_and_embedding_read_the_storage_format() -> None:
    """More than 64 rows and single rows of the table come from the packed storage, K not a whole group."""
    weight = pack_int4(random(16, 40))
    matrix = DeviceInt4(
        weight=weight,
        n_inputs=40,
        packed=torch.empty(0, dtype=torch.int32),
        scale_and_zero=matrices.tinygemm_scale_and_zero(weight),
    )
    x = random(70, 40, seed=5)
    assert relative(matrix.multiply(x), x @ weight.dequantize().T) < 0.01
    ids = torch.tensor([3, 15, 3])
    torch.testing.assert_close(matrix.dequantize(ids), weight.dequantize(ids))


@pytest.mark.parametrize("n_rows", [1, 20, 70])
def test_shapes_and_types_hold_on_a_gpu(n_rows: int) -> None:
    """torch's own checks of the operators accept what is given to them, and results are fp32 [M, N]."""
    with FakeTensorMode():
        device = "meta"  # a torch built without CUDA makes no fake CUDA tensors
        int8 = Int8Weight(
            codes=torch.empty((48, 64), dtype=torch.int8, device=device), scale=torch.empty(48, device=device)
        )
        fp8 = Fp8Weight(
            codes=torch.empty((48, 64), dtype=torch.float8_e4m3fn, device=device),
            scale=torch.empty(48, device=device),
        )
        int4 = Int4Weight(
            codes=torch.empty((48, 32), dtype=torch.uint8, device=device),
            scale=torch.empty((48, 2), dtype=torch.bfloat16, device=device),
            minimum=torch.empty((48, 2), dtype=torch.bfloat16, device=device),
            n_inputs=torch.tensor(64),
        )
        x = torch.empty((n_rows, 64), device=device)
        products = [
            DeviceInt8(weight=int8).multiply(x),
            DeviceFp8(weight=fp8, one=torch.ones((), device=device)).multiply(x),
            DeviceInt4(
                weight=int4,
                n_inputs=64,
                packed=torch._convert_weight_to_int4pack(matrices.tinygemm_codes(int4), 4),
                scale_and_zero=matrices.tinygemm_scale_and_zero(int4),
            ).multiply(x),
        ]
    assert [tuple(product.shape) for product in products] == [(n_rows, 48)] * 3
    assert {product.dtype for product in products} == {torch.float32}


def test_without_units_a_matrix_is_widened_to_bf16() -> None:
    """FP8 and int8 codes are exact in bf16, so only activations are rounded; tensors and bytes tell so."""
    x = random(4, 64, seed=6)
    for weight in (pack_fp8(random(16, 64)), pack_int8(random(16, 64)), pack_int4(random(16, 64))):
        placed = place(weight, Support())
        assert isinstance(placed, matrices.DeviceBf16)
        exact = 0.0 if not isinstance(weight, Int4Weight) else 0.02
        torch.testing.assert_close(placed.dequantize(), weight.dequantize(), rtol=0, atol=exact)
        assert relative(placed.multiply(x), x @ weight.dequantize().T) < 0.01
        assert placed.n_bytes == sum(t.numel() * t.element_size() for t in placed.tensors().values())


def test_matrices_that_do_not_divide_are_widened() -> None:
    """Sizes that the units refuse take the plain product and not an error in the middle of a step."""
    everything = Support(wide_output=True, fp8=True, int8=True)
    assert isinstance(place(pack_fp8(random(24, 64)), everything), matrices.DeviceBf16)
    assert isinstance(place(pack_fp8(random(32, 64)), everything), DeviceFp8)
    assert isinstance(place(pack_int8(random(20, 64)), everything), matrices.DeviceBf16)
    assert isinstance(place(pack_int8(random(24, 64)), everything), DeviceInt8)
    assert isinstance(place(Bf16Weight(data=random(3, 5).bfloat16()), everything), matrices.DeviceBf16)
