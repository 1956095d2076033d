"""The whole model on the operators of a GPU, run on CPU tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline_engine.cuda.support import Support
from paceline_engine.mode import Variant

RELATIVE_ERROR = {
    Variant.FP32: 1e-4,
    Variant.BF16: 0.06,
    Variant.INT8: 0.12,
    Variant.FP8: 0.45,
    Variant.INT4: 1.2,
}


@pytest.mark.parametrize("family", ["gemma3", "llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("variant", list(RELATIVE_ERROR))
@pytest.mark.parametrize("given", [Support(), Support(int8=True, fp8=True)], ids=["plain", "units"])
def test_the_model_is_the_reference(
    given: Support, variant: Variant, family: str, lab: Any, tmp_path: Path
) -> None:
    """Prefill, chunk and decode on a GPU's operators are as near to transformers as on the CPU's kernels."""
    model = lab.reference(family)
    ids = lab.random_ids(48, seed=4)
    expected = lab.reference_logits(model, ids)
    runner = lab.runner(model, variant, kv_dtype=torch.float32, cache_dir=tmp_path, support=given)
    owner = lab.scattered(0)
    rows = [
        runner.forward([owner.piece(ids, 0, 20)], variant),
        runner.forward([owner.piece(ids, 20, 45)], variant),
    ]
    rows += [runner.forward([owner.piece(ids, at, at + 1)], variant) for at in range(45, 48)]
    error = (torch.cat(rows) - expected).square().mean().sqrt() / expected.std()
    assert error < RELATIVE_ERROR[variant]
