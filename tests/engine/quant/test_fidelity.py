"""How near a variant is to the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline_engine.errors import InvalidValueError
from paceline_engine.fidelity import Fidelity, FidelityRequest
from paceline_engine.loading import open_checkpoint
from paceline_engine.mode import Variant
from paceline_engine.model.base import Logits, SequenceSlice
from paceline_engine.model.runner import TorchRunner
from paceline_engine.quant.fidelity import blocks_needed, fidelity_passes


@pytest.fixture(scope="module")
def runner(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> TorchRunner:
    checkpoint = open_checkpoint(str(tiny_model("qwen3").safetensors))
    folder: Path = tmp_path_factory.mktemp("weights")
    variants = (Variant.FP32, Variant.INT8, Variant.INT4)
    return TorchRunner.load(checkpoint, variants=variants, n_blocks=30, cache_dir=folder)


def window_of(runner: TorchRunner, length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(runner.spec.vocab_size, (length,), generator=generator).tolist()


def compare(runner: TorchRunner, ids: list[int], *, first: int = 1) -> dict[Variant, Fidelity]:
    request = FidelityRequest(id="a", token_ids=tuple(ids), first_compared=first, reference=Variant.FP32)
    passes = fidelity_passes(runner, request, list(range(blocks_needed(len(ids), runner))))
    while True:
        try:
            next(passes)
        except StopIteration as ended:
            return dict(ended.value)


def test_the_reference_is_like_itself(runner: TorchRunner) -> None:
    """Beside itself a variant loses nothing, and the coarser of two others loses more."""
    found = compare(runner, window_of(runner, 150, 1))
    same = found[Variant.FP32]
    assert (same.kl_nats, same.n_agreed, same.n_tokens) == (0.0, 149, 149)
    assert 0 < found[Variant.INT8].kl_nats < found[Variant.INT4].kl_nats
    assert found[Variant.INT8].n_agreed > found[Variant.INT4].n_agreed


@pytest.mark.parametrize("first", [1, 40])
def test_the_figures_are_those_of_the_logits(first: int, runner: TorchRunner) -> None:
    """Likelihood, divergence and agreement, taken in stretches, equal what a whole pass gives."""
    ids = window_of(runner, 132, 2)
    rows: dict[Variant, torch.Tensor] = {}
    for variant in (Variant.FP32, Variant.INT4):
        whole = SequenceSlice(token_ids=ids, position=0, block_table=range(9), logits=Logits.ALL)
        rows[variant] = runner.forward([whole], variant)[first - 1 : -1].log_softmax(-1)
    targets = torch.tensor(ids[first:])
    expected, given = rows[Variant.FP32], rows[Variant.INT4]
    found = compare(runner, ids, first=first)
    for variant, row in rows.items():
        likelihood = float(row.gather(1, targets[:, None]).sum())
        assert found[variant].logprob == pytest.approx(likelihood, rel=1e-3)
    assert found[Variant.INT4].n_tokens == 132 - first
    divergence = (expected.exp() * (expected - given)).sum()
    assert found[Variant.INT4].kl_nats == pytest.approx(float(divergence), rel=1e-2)
    agreed = int((expected.argmax(-1) == given.argmax(-1)).sum())
    assert found[Variant.INT4].n_agreed == pytest.approx(agreed, abs=1)


@pytest.mark.parametrize("first", [0, 2])
def test_a_text_with_nothing_to_predict_is_refused(first: int) -> None:
    """At least one token is compared, and at least one stands before it."""
    with pytest.raises(InvalidValueError, match="first_compared"):
        FidelityRequest(id="a", token_ids=(1, 2), first_compared=first, reference=Variant.FP32)
