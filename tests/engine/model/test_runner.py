"""The runner: variants, the shared KV cache, bytes and progress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline_engine.backends.base import Progress
from paceline_engine.mode import Variant
from paceline_engine.model.base import Logits

# Largest error of a logit over the spread of the logits, for three to seven layers of random weights: a
# random network amplifies rounding more than a trained one.
RELATIVE_ERROR = {Variant.BF16: 0.05, Variant.INT8: 0.08, Variant.FP8: 0.35, Variant.INT4: 1.2}


@pytest.mark.parametrize("family", ["gemma3", "llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("variant", list(RELATIVE_ERROR))
def test_variants_stay_near_the_reference(family: str, variant: Variant, lab: Any, tmp_path: Path) -> None:
    """Each precision differs from fp32, by no more than its bound, in prefill and while decoding."""
    model = lab.reference(family)
    ids = lab.random_ids(24, seed=4)
    expected = lab.reference_logits(model, ids)
    runner = lab.runner(model, variant, kv_dtype=torch.float32, cache_dir=tmp_path)
    owner = lab.scattered(0)
    rows = [runner.forward([owner.piece(ids, 0, 20)], variant)]
    rows += [runner.forward([owner.piece(ids, at, at + 1)], variant) for at in range(20, 24)]
    error = (torch.cat(rows) - expected).square().mean().sqrt() / expected.std()
    assert 1e-5 < error < RELATIVE_ERROR[variant]


def test_kv_is_bf16_unless_only_the_reference_runs(lab: Any, tmp_path: Path) -> None:
    """The fp32 reference alone keeps fp32 keys and values; beside others the cache is bf16."""
    model = lab.reference("qwen2")
    assert lab.runner(model).kv.keys.dtype == torch.float32
    mixed = lab.runner(model, Variant.FP32, Variant.INT8, cache_dir=tmp_path)
    assert mixed.kv.keys.dtype == torch.bfloat16
    assert mixed.kv.values.dtype == torch.bfloat16


def test_bf16_kv_costs_little(lab: Any) -> None:
    """Logits over a bf16 cache are near those over an fp32 cache."""
    model = lab.reference("gemma3")
    ids = lab.random_ids(24)
    expected = lab.reference_logits(model, ids)
    found = lab.runner(model, kv_dtype=torch.bfloat16).forward([lab.scattered(0).piece(ids, 0)], Variant.FP32)
    error = (found - expected).square().mean().sqrt() / expected.std()
    assert 1e-6 < error < 0.05


def test_variants_share_one_cache(lab: Any, tmp_path: Path) -> None:
    """KV written by int8 is read by bf16: a stream changes its variant between two tokens."""
    model = lab.reference("gemma3")
    ids = lab.random_ids(20)
    runner = lab.runner(model, Variant.BF16, Variant.INT8, cache_dir=tmp_path)
    owner = lab.scattered(0)
    runner.forward([owner.piece(ids, 0, 12, logits=Logits.NONE)], Variant.INT8)
    mixed = runner.forward([owner.piece(ids, 12)], Variant.BF16)
    expected = lab.reference_logits(model, ids)[12:]
    assert (mixed - expected).square().mean().sqrt() / expected.std() < 0.1


def test_copied_block_serves_another_sequence(lab: Any) -> None:
    """After a copy the target block gives the same logits, and writing to it leaves the source alone."""
    model = lab.reference("llama")
    ids, other = lab.random_ids(6), lab.random_ids(6, seed=8)
    runner = lab.runner(model)
    owner, twin = type(lab.scattered(0))(blocks=(7, 8)), type(lab.scattered(0))(blocks=(7, 30))
    runner.forward([owner.piece(ids, 0)], Variant.FP32)
    runner.copy_block(8, 30)
    split = ids[:5] + other[5:]
    row = runner.forward([twin.piece(split, 5)], Variant.FP32)
    torch.testing.assert_close(row, lab.reference_logits(model, split)[5:], rtol=0.0, atol=1e-3)
    longer = [*ids, 3]
    row = runner.forward([owner.piece(longer, 6)], Variant.FP32)
    torch.testing.assert_close(row, lab.reference_logits(model, longer)[6:], rtol=0.0, atol=1e-3)


@pytest.mark.parametrize("family", ["gemma3", "llama"])
def test_bytes_per_variant_count_what_a_step_reads(family: str, lab: Any, tmp_path: Path) -> None:
    """The output matrix counts whole, an embedding beside it as one row, bf16 as half of fp32."""
    model = lab.reference(family)
    n_matrices = sum(
        p.numel()
        for name, p in model.named_parameters()
        if p.ndim == 2 and (family == "gemma3" or "embed_tokens" not in name)
    )
    n_vectors = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    runner = lab.runner(
        model, Variant.FP32, Variant.BF16, Variant.INT8, Variant.INT4, cache_dir=tmp_path, lazy=True
    )
    found = runner.bytes_per_variant()
    row = 0 if family == "gemma3" else 64
    assert found[Variant.FP32] == 4 * (n_matrices + n_vectors + row)
    assert found[Variant.BF16] == 2 * (n_matrices + row) + 4 * n_vectors
    assert found[Variant.BF16] > found[Variant.INT8] > found[Variant.INT4]
    assert found[Variant.INT8] > n_matrices


@pytest.mark.parametrize("order", [(Variant.BF16, Variant.INT4), (Variant.INT4, Variant.BF16)])
def test_a_tied_table_is_in_memory_once(order: tuple[Variant, ...], lab: Any, tmp_path: Path) -> None:
    """Whichever is loaded first, a low precision looks its tokens up in bf16's output matrix."""
    runner = lab.runner(lab.reference("gemma3"), *order, cache_dir=tmp_path, lazy=True)
    for variant in order:
        runner.forward([lab.scattered(0).piece([1, 2], 0)], variant)
    bf16, int4 = (runner._weights[variant] for variant in (Variant.BF16, Variant.INT4))
    assert bf16.embedding is bf16.output
    assert int4.embedding.tensors()["data"] is bf16.output.tensors()["data"]
    assert int4.output is not bf16.output


def test_progress_names_a_conversion_only_where_there_is_one(lab: Any, tmp_path: Path) -> None:
    """Converting rises to 1 the first time; what the cache has, a later load maps without a word of it."""
    for stages in ({"load", "convert"}, {"load"}):
        seen: list[Progress] = []
        lab.runner(
            lab.reference("qwen3"),
            Variant.BF16,
            Variant.INT8,
            cache_dir=tmp_path,
            on_progress=seen.append,
        )
        assert {progress.stage for progress in seen} == stages
        for stage in stages:
            done = [progress.done for progress in seen if progress.stage == stage]
            assert done == sorted(done)
            assert done[-1] == (1.0 if stage == "convert" else pytest.approx(0.9))


def test_lazy_variants_are_made_when_first_used(lab: Any, tmp_path: Path) -> None:
    """A lazy runner writes nothing to the cache until a pass asks for the variant."""
    runner = lab.runner(lab.reference("qwen3"), Variant.INT8, cache_dir=tmp_path, lazy=True)
    assert not list(tmp_path.rglob("*.safetensors"))
    runner.forward([lab.scattered(0).piece([1, 2], 0)], Variant.INT8)
    assert len(list(tmp_path.rglob("*-int8-*.safetensors"))) == 1


def test_what_is_converted_is_left_for_its_first_use(lab: Any, tmp_path: Path) -> None:
    """A lazy runner converts and loads what the cache lacks, with progress; the next one loads nothing."""
    for loaded, stages in (((Variant.INT8, Variant.INT4), {"load", "convert"}), ((), set[str]())):
        seen: list[Progress] = []
        runner = lab.runner(lab.reference("qwen3"), Variant.INT8, Variant.INT4, cache_dir=tmp_path, lazy=True)
        runner.load_unconverted(seen.append)
        assert runner.loaded == loaded
        assert {progress.stage for progress in seen} == stages
    runner.forward([lab.scattered(0).piece([1, 2], 0)], Variant.INT4)
    assert runner.loaded == (Variant.INT4,)


@pytest.mark.parametrize("variant", [Variant.FP32, Variant.BF16, Variant.INT8])
def test_rows_do_not_depend_on_their_neighbours(variant: Variant, lab: Any, tmp_path: Path) -> None:
    """A sequence's logits beside a loud neighbour are those of the sequence alone, up to rounding."""
    runner = lab.runner(lab.reference("qwen2"), variant, cache_dir=tmp_path)
    quiet, loud = lab.random_ids(7, seed=1), lab.random_ids(21, seed=2)
    owners = [lab.scattered(index) for index in range(4)]
    alone = runner.forward([owners[0].piece(quiet, 0)], variant)
    pieces = [owners[index].piece(loud, 0) for index in range(1, 4)]
    beside = runner.forward([pieces[0], owners[0].piece(quiet, 0), *pieces[1:]], variant)
    torch.testing.assert_close(beside[21:28], alone, rtol=1e-4, atol=1e-4)
