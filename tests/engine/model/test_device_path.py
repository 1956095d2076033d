"""The whole model on the operators of a GPU, run on CPU tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline_engine.cuda.support import Support
from paceline_engine.mode import Variant
from paceline_engine.model.base import Logits

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


@pytest.mark.parametrize("family", ["gemma3", "llama"])
@pytest.mark.parametrize("variant", [Variant.FP32, Variant.INT8])
def test_captured_steps_give_the_logits_of_uncaptured_ones(
    family: str, variant: Variant, lab: Any, tmp_path: Path
) -> None:
    """Three unequal sequences decode through captured steps; no block but theirs and scratch changes."""
    model = lab.reference(family)
    runners = [
        lab.runner(model, variant, cache_dir=tmp_path, support=Support(int8=True), kv_dtype=torch.float32)
        for _ in range(2)
    ]
    # Sums in another order may round an int8 code to its neighbour, which a random network amplifies.
    limit = 1e-5 if variant is Variant.FP32 else 5e-3
    calls: list[int] = []

    def capture(work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        work()
        return lambda: (calls.append(1), work())[1]

    assert runners[0].capture_decode(max_sequences=4, capture=capture) > 0
    texts = [lab.random_ids(length, seed=length) for length in (40, 23, 12)]
    owners = [lab.scattered(index) for index in range(3)]
    for step in range(5):
        found = []
        for runner in runners:
            if not step:
                pieces = [owner.piece(ids, 0, len(ids) - 5) for owner, ids in zip(owners, texts, strict=True)]
            else:
                pieces = [
                    owner.piece(ids, len(ids) - 6 + step, len(ids) - 5 + step, logits=Logits.LAST)
                    for owner, ids in zip(owners, texts, strict=True)
                ]
            found.append(runner.forward(pieces, variant))
        assert (found[0] - found[1]).square().mean().sqrt() / found[1].std() < limit
    assert len(calls) == 4
    scratch = runners[0].n_blocks
    assert runners[0].kv.n_blocks == scratch + 1
    keys = [runner.kv.keys[:, :scratch] for runner in runners]
    assert torch.equal(keys[0] == 0, keys[1] == 0)
    assert (keys[0] - keys[1]).square().mean().sqrt() / keys[1].std() < limit


def test_a_pass_with_a_prefill_in_it_is_not_replayed(lab: Any) -> None:
    """Only passes of one token for each sequence, all of which want logits, are."""
    runner = lab.runner(lab.reference("llama"), support=Support())

    def capture(work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        work()

        def fail() -> torch.Tensor:
            raise AssertionError("replayed")

        return fail

    runner.capture_decode(max_sequences=2, capture=capture)
    ids = lab.random_ids(9)
    owner, other = lab.scattered(0), lab.scattered(1)
    runner.forward([owner.piece(ids, 0, 4), other.piece(ids, 0, 1)], Variant.FP32)
    runner.forward([owner.piece(ids, 4, 5, logits=Logits.NONE)], Variant.FP32)
    with pytest.raises(AssertionError, match="replayed"):
        runner.forward([owner.piece(ids, 5, 6)], Variant.FP32)


def test_a_pass_that_runs_out_of_memory_runs_once_more(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory kept for other sizes is given back first; the second failure is the caller's."""
    runner = lab.runner(lab.reference("llama"))
    right, failures = runner._decoder.forward, [2]
    ids, owner = lab.random_ids(6), lab.scattered(0)

    def forward(*args: Any) -> torch.Tensor:
        failures[0] -= 1
        if failures[0] > 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return right(*args)

    monkeypatch.setattr(runner._decoder, "forward", forward)
    logits = runner.forward([owner.piece(ids, 0)], Variant.FP32)
    torch.testing.assert_close(logits, lab.reference_logits(lab.reference("llama"), ids), rtol=0, atol=1e-3)
    failures[0] = 3
    with pytest.raises(torch.OutOfMemoryError):
        runner.forward([owner.piece(ids, 0)], Variant.FP32)


def test_on_a_cpu_nothing_is_captured(lab: Any) -> None:
    """Asking for it is free."""
    assert lab.runner(lab.reference("llama")).capture_decode(max_sequences=4) == 0
