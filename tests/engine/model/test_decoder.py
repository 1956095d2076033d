"""The decoder against transformers, on tiny random models in fp32."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from paceline_engine.mode import Variant
from paceline_engine.model.base import Logits

FAMILIES = ("gemma3", "llama", "mistral", "qwen2", "qwen3")
TOLERANCE = {"rtol": 0.0, "atol": 1e-3}


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_matches_the_reference(family: str, lab: Any) -> None:
    """All logits of a prompt four times as long as the window are those of transformers."""
    model = lab.reference(family)
    ids = lab.random_ids(33)
    logits = lab.runner(model).forward([lab.scattered(0).piece(ids, 0)], Variant.FP32)
    expected = lab.reference_logits(model, ids)
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, **TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_decode_matches_the_reference(family: str, lab: Any) -> None:
    """One token after the other gives the logits of the whole, across blocks and past the window."""
    model = lab.reference(family)
    runner, owner, ids = lab.runner(model), lab.scattered(1), lab.random_ids(30, seed=1)
    rows = [runner.forward([owner.piece(ids, 0, 5)], Variant.FP32)]
    rows += [
        runner.forward([owner.piece(ids, at, at + 1, logits=Logits.LAST)], Variant.FP32)
        for at in range(5, len(ids))
    ]
    torch.testing.assert_close(torch.cat(rows), lab.reference_logits(model, ids), **TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_prefill_equals_whole_prefill(family: str, lab: Any) -> None:
    """Chunks that end inside blocks, at their ends and past the window change nothing."""
    model = lab.reference(family)
    runner, owner, ids = lab.runner(model), lab.scattered(2), lab.random_ids(37, seed=2)
    bounds = (0, 3, 4, 12, 13, 29, 37)
    rows = [
        runner.forward([owner.piece(ids, start, end)], Variant.FP32)
        for start, end in itertools.pairwise(bounds)
    ]
    torch.testing.assert_close(torch.cat(rows), lab.reference_logits(model, ids), **TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_packed_together_stay_apart(family: str, lab: Any) -> None:
    """A prefill, a chunk and two decodes in one pass each get the logits of their own sequence."""
    model = lab.reference(family)
    runner = lab.runner(model)
    lengths = (19, 26, 9, 1)
    begun = (0, 10, 8, 0)
    owners = [lab.scattered(index) for index in range(4)]
    texts = [lab.random_ids(length, seed=10 + length) for length in lengths]
    runner.forward(
        [
            owners[index].piece(texts[index], 0, begun[index], logits=Logits.NONE)
            for index in range(4)
            if begun[index]
        ],
        Variant.FP32,
    )
    wanted = (Logits.LAST, Logits.ALL, Logits.LAST, Logits.ALL)
    logits = runner.forward(
        [owners[index].piece(texts[index], begun[index], logits=wanted[index]) for index in range(4)],
        Variant.FP32,
    )
    expected = [lab.reference_logits(model, text) for text in texts]
    torch.testing.assert_close(
        logits, torch.cat([expected[0][-1:], expected[1][10:], expected[2][-1:], expected[3]]), **TOLERANCE
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_rows_together_equal_their_solo_runs(family: str, lab: Any) -> None:
    """Three unequal prompts decoded greedily in one batch give the tokens of each alone."""
    model = lab.reference(family)
    prompts = [lab.random_ids(length, seed=length) for length in (3, 11, 22)]

    def decode(runner: Any, group: list[int]) -> dict[int, list[int]]:
        texts = {index: list(prompts[index]) for index in group}
        done = dict.fromkeys(group, 0)
        for _ in range(12):
            slices = [
                lab.scattered(index).piece(texts[index], done[index], logits=Logits.LAST) for index in group
            ]
            tokens = runner.forward(slices, Variant.FP32).argmax(-1).tolist()
            for index, token in zip(group, tokens, strict=True):
                done[index] = len(texts[index])
                texts[index].append(token)
        return texts

    together = decode(lab.runner(model), [0, 1, 2])
    alone = {index: decode(lab.runner(model), [index])[index] for index in range(3)}
    assert together == alone
    assert len({tuple(text[-12:]) for text in together.values()}) == 3


def test_a_pass_without_logits_still_writes_its_kv(lab: Any) -> None:
    """A chunk that asks for nothing returns no rows, and the next chunk builds on it."""
    model = lab.reference("llama")
    runner, owner, ids = lab.runner(model), lab.scattered(0), lab.random_ids(12)
    nothing = runner.forward([owner.piece(ids, 0, 8, logits=Logits.NONE)], Variant.FP32)
    assert nothing.shape == (0, 97)
    logits = runner.forward([owner.piece(ids, 8)], Variant.FP32)
    torch.testing.assert_close(logits, lab.reference_logits(model, ids)[8:], **TOLERANCE)


def test_biases_on_all_projections(lab: Any) -> None:
    """Llama's attention_bias puts biases on q, k, v and on the output projection."""
    model = lab.build_reference("llama", attention_bias=True)
    assert lab.checkpoint_of(model).spec.output_bias
    ids = lab.random_ids(9)
    logits = lab.runner(model).forward([lab.scattered(0).piece(ids, 0)], Variant.FP32)
    torch.testing.assert_close(logits, lab.reference_logits(model, ids), **TOLERANCE)


def test_overwriting_kv_leaves_no_trace_of_a_rejected_draft(lab: Any) -> None:
    """Tokens run past the accepted ones are overwritten by those that follow."""
    model = lab.reference("gemma3")
    runner, owner, ids = lab.runner(model), lab.scattered(0), lab.random_ids(20)
    runner.forward([owner.piece(ids, 0, 10)], Variant.FP32)
    draft = ids[:10] + lab.random_ids(6, seed=99)
    runner.forward([owner.piece(draft, 10, 16)], Variant.FP32)
    logits = runner.forward([owner.piece(ids, 10)], Variant.FP32)
    torch.testing.assert_close(logits, lab.reference_logits(model, ids)[10:], **TOLERANCE)
