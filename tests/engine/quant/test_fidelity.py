"""How near a variant is to the reference."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline_engine.errors import InvalidValueError
from paceline_engine.loading import open_checkpoint
from paceline_engine.mode import Variant
from paceline_engine.model.base import Logits, SequenceSlice
from paceline_engine.model.runner import TorchRunner
from paceline_engine.quant.fidelity import measure_fidelity


@pytest.fixture(scope="module")
def runner(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> TorchRunner:
    checkpoint = open_checkpoint(str(tiny_model("qwen3").safetensors))
    folder: Path = tmp_path_factory.mktemp("weights")
    variants = (Variant.FP32, Variant.INT8, Variant.INT4)
    return TorchRunner.load(checkpoint, variants=variants, n_blocks=30, cache_dir=folder)


def window_of(runner: TorchRunner, length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(runner.spec.vocab_size, (length,), generator=generator).tolist()


def test_the_reference_is_like_itself(runner: TorchRunner) -> None:
    """Beside itself a variant loses nothing, and the coarser of two others loses more."""
    found = measure_fidelity(runner, [window_of(runner, 150, 1)], reference=Variant.FP32)
    same = found[Variant.FP32]
    assert (same.perplexity_ratio, same.kl_nats, same.top1_agreement) == (1.0, 0.0, 1.0)
    assert 0 < found[Variant.INT8].kl_nats < found[Variant.INT4].kl_nats
    assert found[Variant.INT8].top1_agreement > found[Variant.INT4].top1_agreement


def test_the_figures_are_those_of_the_logits(runner: TorchRunner) -> None:
    """Ratio, divergence and agreement equal what whole passes give, though they are taken piece by piece."""
    windows = [window_of(runner, 100, 2), window_of(runner, 33, 3)]
    rows: dict[Variant, torch.Tensor] = {}
    for variant in (Variant.FP32, Variant.INT4):
        parts = [
            runner.forward(
                [SequenceSlice(token_ids=ids, position=0, block_table=range(7), logits=Logits.ALL)], variant
            )[:-1]
            for ids in windows
        ]
        rows[variant] = torch.cat(parts).log_softmax(-1)
    targets = torch.tensor([each for ids in windows for each in ids[1:]])
    expected, given = rows[Variant.FP32], rows[Variant.INT4]
    picked = [each.gather(1, targets[:, None]).mean() for each in (expected, given)]
    found = measure_fidelity(runner, windows, reference=Variant.FP32)[Variant.INT4]
    assert found.n_tokens == 131
    assert found.perplexity_ratio == pytest.approx(math.exp(float(picked[0] - picked[1])), rel=1e-3)
    divergence = (expected.exp() * (expected - given)).sum(-1).mean()
    assert found.kl_nats == pytest.approx(float(divergence), rel=1e-2)
    agreement = (expected.argmax(-1) == given.argmax(-1)).float().mean()
    assert found.top1_agreement == pytest.approx(float(agreement), abs=0.01)


@pytest.mark.parametrize("lengths", [[], [1], [20, 161]])
def test_windows_that_cannot_be_run_are_refused(runner: TorchRunner, lengths: list[int]) -> None:
    """No window, one with nothing to predict, and one beyond the blocks are named."""
    with pytest.raises(InvalidValueError, match="windows"):
        measure_fidelity(runner, [window_of(runner, each, 4) for each in lengths], reference=Variant.FP32)


def test_a_reference_that_is_not_loaded_is_refused(runner: TorchRunner) -> None:
    """The reference must be one of the runner's variants."""
    with pytest.raises(InvalidValueError, match="reference"):
        measure_fidelity(runner, [window_of(runner, 9, 5)])
