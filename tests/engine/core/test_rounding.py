"""Greedy decoding in bf16: drafts may change a token only where two were as good but for rounding."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline_engine.core import Engine, EngineConfig
from paceline_engine.loading import open_checkpoint, open_tokenizer
from paceline_engine.mode import Drafter, Speculation, Variant
from paceline_engine.model.base import Logits, SequenceSlice
from paceline_engine.model.runner import TorchRunner

N_TOKENS, N_BLOCKS = 24, 64
SPECULATIONS = {
    "self": Speculation(drafter=Drafter.SELF, max_draft_tokens=5, draft_variant=Variant.INT4),
    "ngram": Speculation(drafter=Drafter.NGRAM, max_draft_tokens=5),
}


def logits_after(runner: TorchRunner, ids: Sequence[int], *, chunk: int) -> torch.Tensor:
    """[len(ids), vocab], computed ``chunk`` tokens a pass: how tokens are grouped changes rounding alone."""
    table = tuple(range(N_BLOCKS))
    rows = [
        runner.forward(
            [
                SequenceSlice(
                    token_ids=tuple(ids[at : at + chunk]), position=at, block_table=table, logits=Logits.ALL
                )
            ],
            Variant.BF16,
        )
        for at in range(0, len(ids), chunk)
    ]
    return torch.cat(rows)


def is_near_tie(runner: TorchRunner, prefix: Sequence[int], one: int, two: int) -> bool:
    """Whether rounding can decide between two tokens after ``prefix``.

    What rounding does is found by computing the same prefix in passes of three sizes; it may shift both
    logits by a few times as much.
    """
    found = [logits_after(runner, prefix, chunk=chunk)[-1] for chunk in (1, 3, len(prefix))]
    noise = max(float((a - b).abs().max()) for a, b in itertools.combinations(found, 2))
    return float((found[0][one] - found[0][two]).abs()) <= 4 * noise


@pytest.mark.parametrize("family", ["gemma3", "llama"])
def test_only_near_ties_differ(
    family: str, tiny_model: Callable[..., Any], make_bench: Callable[..., Any], tmp_path: Path
) -> None:
    """Where the first difference to a run without drafts is, the two tokens' logits are within rounding; the
    4-bit variant's own output is told apart by that."""
    folder = str(tiny_model(family).safetensors)
    variants = (Variant.BF16, Variant.INT4)
    runner = TorchRunner.load(
        open_checkpoint(folder), variants=variants, n_blocks=N_BLOCKS, block_size=4, cache_dir=tmp_path
    )
    assert runner.kv.keys.dtype is torch.bfloat16
    prompts = [[20 + 3 * i, 21, 22 + i, 23, 20 + 3 * i, 21, 22 + i][: 3 + i % 5] for i in range(24)]

    def outputs(variant: Variant, speculation: Speculation | None) -> list[list[int]]:
        bench = make_bench()
        bench.engine = Engine(
            runner, open_tokenizer(folder), config=EngineConfig(adapt_drafts=False), clock=bench.clock
        )
        for i, prompt in enumerate(prompts):
            bench.submit(
                str(i), prompt, bench.plan(N_TOKENS, variant, speculation=speculation), ignore_eos=True
            )
        out = bench.run()
        assert not out.errors
        return [out.ids(str(i)) for i in range(len(prompts))]

    plain = outputs(Variant.BF16, None)

    def far_apart(found: Sequence[Sequence[int]]) -> int:
        """Outputs whose first difference is more than rounding."""
        count = 0
        for prompt, ids, expected in zip(prompts, found, plain, strict=True):
            assert len(ids) == N_TOKENS
            pairs = enumerate(zip(ids, expected, strict=True))
            if (at := next((at for at, (one, two) in pairs if one != two), None)) is not None:
                count += not is_near_tie(runner, [*prompt, *expected[:at]], ids[at], expected[at])
        return count

    for speculation in SPECULATIONS.values():
        assert far_apart(outputs(Variant.BF16, speculation)) == 0
    assert far_apart(outputs(Variant.INT4, None)) > 0
