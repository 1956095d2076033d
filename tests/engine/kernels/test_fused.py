"""Norms, rotation with cache writes, and gated activations: native against torch."""

import pytest
import torch
from torch.nn import functional

from paceline_engine.errors import InvalidValueError
from paceline_engine.kernels import fallback
from paceline_engine.model.spec import Activation

SIZES = [(1, 1), (1, 640), (3, 7), (5, 100), (200, 333)]


@pytest.mark.parametrize(("m", "n"), SIZES)
def test_rms_norm(native, rand, m, n):
    """RMSNorm equals torch's own."""
    x, weight = rand(m, n), rand(n)
    reference = functional.rms_norm(x, (n,), weight, 1e-6)
    torch.testing.assert_close(native.rms_norm(x, weight, 1e-6), reference, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fallback.rms_norm(x, weight, 1e-6), reference, rtol=1e-5, atol=1e-6)


def test_rms_norm_of_zeros_and_nan(kernels):
    """A row of zeros gives zeros, a row with NaN gives NaN, and neither touches the other."""
    x = torch.zeros(2, 40)
    x[1, 39] = float("nan")
    result = kernels.rms_norm(x, torch.ones(40), 1e-6)
    assert torch.equal(result[0], torch.zeros(40))
    assert bool(result[1].isnan().all())


@pytest.mark.parametrize(("m", "n"), SIZES)
@pytest.mark.parametrize("with_post", [True, False])
def test_residual_norm(native, rand, m, n, with_post):
    """The stream and its norm equal the fallback's, with and without a norm after the sublayer."""
    x, weight, post = rand(m, n), rand(n), rand(n) if with_post else None
    ours = rand(m, n)
    theirs = ours.clone()
    result = native.residual_norm(x, ours, weight, 1e-6, post)
    reference = fallback.residual_norm(x, theirs, weight, 1e-6, post)
    torch.testing.assert_close(result, reference, rtol=2e-5, atol=1e-5)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize(("m", "n"), SIZES)
def test_gated_activation(native, rand, activation, m, n):
    """SiLU and tanh-GELU gates equal torch's."""
    x = rand(m, 2 * n) * 5
    torch.testing.assert_close(
        native.gated_activation(x, activation),
        fallback.gated_activation(x, activation),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("activation", list(Activation))
def test_gates_far_from_zero(kernels, activation):
    """Far positive gates pass the value, far negative ones stop it, and NaN stays NaN."""
    gate = torch.tensor([[100.0, -100.0, 1e4, -1e4, 0.0, float("nan"), float("inf")]])
    result = kernels.gated_activation(torch.cat([gate, torch.ones(1, 7)], dim=1), activation)
    assert torch.equal(result[0, :5].abs(), torch.tensor([100.0, 0.0, 1e4, 0.0, 0.0]))
    assert bool(result[0, 5].isnan())
    assert result[0, 6] == float("inf")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 1, 256), (3, 3, 10), (8, 2, 64)])
@pytest.mark.parametrize("extras", [True, False])
def test_rope_and_cache(native, rand, dtype, heads, kv_heads, head_dim, extras):
    """q and the cache's k and v equal the fallback's; other slots keep what they held."""
    n_tokens, width = 21, (heads + 2 * kv_heads) * head_dim
    angles = rand(n_tokens, head_dim // 2)
    slots = torch.randperm(48, generator=torch.Generator().manual_seed(1))[:n_tokens]
    caches = [rand(3, 16, kv_heads, head_dim).to(dtype) for _ in range(2)]
    ours, theirs = [c.clone() for c in caches], [c.clone() for c in caches]
    rest = (rand(width), rand(head_dim), rand(head_dim)) if extras else (None, None, None)
    shared = (rand(n_tokens, width), angles.cos(), angles.sin(), slots)
    q = native.rope_and_cache(*shared, *ours, heads, *rest, 1e-6)
    reference = fallback.rope_and_cache(*shared, *theirs, heads, *rest, 1e-6)
    torch.testing.assert_close(q, reference, rtol=1e-5, atol=1e-5)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    untouched = torch.ones(48, dtype=torch.bool)
    untouched[slots] = False
    for mine, other, before in zip(ours, theirs, caches, strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)
        assert torch.equal(mine.flatten(0, 1)[untouched], before.flatten(0, 1)[untouched])


def test_values_are_rounded_to_bf16_as_torch_does(kernels):
    """Ties, subnormals, infinity and NaN are narrowed to the same values as torch's."""
    values = torch.tensor([1.00390625, 1.01171875, 1e-40, -0.0, float("inf"), float("nan"), 3.4e38, 65504.0])
    qkv = torch.cat([torch.zeros(16), values])[None]
    k, v = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16), torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16)
    kernels.rope_and_cache(
        qkv, torch.ones(1, 4), torch.zeros(1, 4), torch.tensor([0]), k, v, 1, None, None, None, 1e-6
    )
    torch.testing.assert_close(v.view(-1), values.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("slot", [-1, 16])
def test_a_slot_outside_the_cache_is_refused(native, rand, slot):
    """A slot that the cache does not have is an error, and nothing is written."""
    k, v = torch.zeros(1, 16, 1, 8), torch.zeros(1, 16, 1, 8)
    with pytest.raises(InvalidValueError, match="slots"):
        native.rope_and_cache(
            rand(2, 24), rand(2, 4), rand(2, 4), torch.tensor([0, slot]), k, v, 1, None, None, None, 1e-6
        )
    assert not k.any()


def test_rows_are_the_same_bits_in_every_batch(native, rand):
    """Norms and activations of a row do not depend on its neighbours or the number of threads."""
    x, weight = rand(300, 640), rand(640)
    for call in (
        lambda rows: native.rms_norm(rows, weight, 1e-6),
        lambda rows: native.gated_activation(rows, Activation.GELU_TANH),
    ):
        torch.set_num_threads(2)
        whole = call(x)
        torch.set_num_threads(1)
        assert torch.equal(call(x[7:8]), whole[7:8])
        assert torch.equal(call(x), whole)
