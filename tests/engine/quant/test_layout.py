"""What a decode step reads, told without the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline_engine.loading import open_checkpoint
from paceline_engine.mode import Variant
from paceline_engine.model.runner import TorchRunner
from paceline_engine.quant.layout import bytes_per_step


@pytest.mark.parametrize("family", ["gemma3", "llama", "qwen2"])
def test_the_bytes_of_a_step_are_those_of_the_loaded_weights(
    family: str, tiny_model: Any, tmp_path: Path
) -> None:
    """With and without tied embeddings, biases and extra norms, for every precision."""
    checkpoint = open_checkpoint(str(tiny_model(family).safetensors))
    runner = TorchRunner.load(checkpoint, variants=tuple(Variant), n_blocks=2, cache_dir=tmp_path)
    expected = {variant: bytes_per_step(checkpoint.spec, variant) for variant in Variant}
    assert runner.bytes_per_variant() == expected
