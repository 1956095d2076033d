"""The same model as a GGUF and as a safetensors folder, from the file to the logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline_engine.loading import open_checkpoint
from paceline_engine.mode import Variant


@pytest.mark.parametrize("family", ["gemma3", "llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_files_give_the_logits_of_the_reference(family: str, kind: str, tiny_model: Any, lab: Any) -> None:
    """Norm offsets, row orders, tied matrices and RoPE scalings of both formats end in equal logits."""
    tiny = tiny_model(family)
    path: Path = tiny.gguf if kind == "gguf" else tiny.safetensors
    runner = lab.runner(open_checkpoint(str(path)))
    ids = lab.random_ids(60, vocab_size=runner.spec.vocab_size)
    owner = type(lab.scattered(0))(blocks=tuple(range(63, 40, -1)))
    rows = [
        runner.forward([owner.piece(ids, start, end)], Variant.FP32) for start, end in ((0, 41), (41, 60))
    ]
    expected = lab.reference_logits(tiny.reference, ids)
    assert expected.std() > 0.1
    torch.testing.assert_close(torch.cat(rows), expected, rtol=0.0, atol=1e-3)


def test_a_quantized_gguf_gives_the_logits_of_its_values(tiny_model: Any, lab: Any) -> None:
    """Q8_0 matrices are read as the values that they stand for."""
    tiny = tiny_model("gemma3", tensor_type="Q8_0")
    ids = lab.random_ids(20)
    runner = lab.runner(open_checkpoint(str(tiny.gguf)))
    logits = runner.forward([lab.scattered(0).piece(ids, 0)], Variant.FP32)
    torch.testing.assert_close(logits, lab.reference_logits(tiny.reference, ids), rtol=0.0, atol=1e-3)


def test_both_formats_share_no_cached_weights(tiny_model: Any, lab: Any, tmp_path: Path) -> None:
    """Two files of one model have digests of their own, and int8 weights from both agree."""
    tiny = tiny_model("qwen3")
    ids = lab.random_ids(12)
    found = []
    for path in (tiny.gguf, tiny.safetensors):
        runner = lab.runner(open_checkpoint(str(path)), Variant.INT8, cache_dir=tmp_path)
        found.append(runner.forward([lab.scattered(0).piece(ids, 0)], Variant.INT8))
    torch.testing.assert_close(found[0], found[1], rtol=0.0, atol=1e-3)
    assert len(list(tmp_path.rglob("*-int8-*.safetensors"))) == 2
