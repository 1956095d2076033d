"""Adapters against transformers models into which they were merged, on tiny random models in fp32."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline_engine.errors import UnsupportedModelError
from paceline_engine.mode import Variant
from paceline_engine.model.base import Logits

FAMILIES = ("gemma3", "llama", "mistral", "qwen2", "qwen3")
TOLERANCE = {"rtol": 0.0, "atol": 1e-3}
TinyAdapter = Callable[..., Any]


def merged(model: Any, deltas: dict[str, torch.Tensor]) -> Any:
    """The model with an adapter's updates in its weights."""
    changed = copy.deepcopy(model)
    weights = dict(changed.named_parameters())
    with torch.no_grad():
        for name, delta in deltas.items():
            weights[name] += delta
    return changed


def with_adapter(piece: Any, adapter: Any) -> Any:
    return dataclasses.replace(piece, adapter=adapter)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_equals_the_merged_model(family: str, lab: Any, tiny_adapter: TinyAdapter) -> None:
    """Prefill and decode of every family give the logits of the weights with the updates added."""
    model = lab.reference(family)
    made = tiny_adapter(model)
    runner, ids = lab.runner(model), lab.random_ids(21)
    adapter = runner.read_adapter(str(made.folder))
    owner = lab.scattered(0)
    rows = [runner.forward([with_adapter(owner.piece(ids, 0, 18), adapter)], Variant.FP32)]
    rows += [
        runner.forward([with_adapter(owner.piece(ids, at, at + 1), adapter)], Variant.FP32)
        for at in range(18, 21)
    ]
    expected = lab.reference_logits(merged(model, made.deltas), ids)
    assert (expected - lab.reference_logits(model, ids)).abs().max() > 0.1
    torch.testing.assert_close(torch.cat(rows), expected, **TOLERANCE)


@pytest.mark.parametrize(
    "settings",
    [
        {"targets": ("q_proj", "v_proj")},
        {"targets": ("k_proj", "up_proj")},
        {"targets": ("down_proj",), "rank": 1},
        {"use_rslora": True, "rank": 9},
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
    ],
    ids=str,
)
def test_some_projections_ranks_and_types(
    settings: dict[str, Any], lab: Any, tiny_adapter: TinyAdapter
) -> None:
    """Any set of projections, any rank and every stored type."""
    model = lab.reference("qwen3")
    made = tiny_adapter(model, **settings)
    runner, ids = lab.runner(model), lab.random_ids(12)
    adapter = runner.read_adapter(str(made.folder))
    logits = runner.forward([with_adapter(lab.scattered(0).piece(ids, 0), adapter)], Variant.FP32)
    expected = lab.reference_logits(merged(model, made.deltas), ids)
    torch.testing.assert_close(logits, expected, **TOLERANCE)


def test_rows_of_several_adapters_share_a_pass(lab: Any, tiny_adapter: TinyAdapter) -> None:
    """Two adapters, one of them twice, and the model itself in one pass, whatever logits they ask for."""
    model = lab.reference("gemma3")
    runner = lab.runner(model)
    made = [tiny_adapter(model, seed=seed) for seed in (1, 2)]
    one, two = (runner.read_adapter(str(each.folder)) for each in made)
    models = {None: model, one: merged(model, made[0].deltas), two: merged(model, made[1].deltas)}
    parts = [
        (one, 9, Logits.LAST), (None, 5, Logits.ALL), (two, 12, Logits.ALL), (one, 3, Logits.NONE),
        (one, 6, Logits.ALL), (None, 4, Logits.LAST),
    ]  # fmt: skip
    texts = [lab.random_ids(n, seed=n) for _, n, _ in parts]
    slices = [
        with_adapter(lab.scattered(index, n_sequences=6).piece(text, 0, logits=logits), adapter)
        for index, ((adapter, _, logits), text) in enumerate(zip(parts, texts, strict=True))
    ]
    expected = []
    for (adapter, _, logits), text in zip(parts, texts, strict=True):
        whole = lab.reference_logits(models[adapter], text)
        expected.append({Logits.ALL: whole, Logits.LAST: whole[-1:], Logits.NONE: whole[:0]}[logits])
    torch.testing.assert_close(runner.forward(slices, Variant.FP32), torch.cat(expected), **TOLERANCE)


@pytest.mark.parametrize("variant", list(Variant))
def test_rows_beside_others_are_as_alone(variant: Variant, lab: Any, tiny_adapter: TinyAdapter) -> None:
    """In every precision an adapter's rows have the very bits that they have alone."""
    model = lab.reference("llama")
    runner = lab.runner(model, *Variant)
    adapter = runner.read_adapter(str(tiny_adapter(model).folder))
    texts = [lab.random_ids(n, seed=n) for n in (7, 13, 2)]
    slices = [lab.scattered(index).piece(text, 0) for index, text in enumerate(texts)]
    slices[1:] = [with_adapter(each, adapter) for each in slices[1:]]
    together = runner.forward(slices, variant)
    alone = torch.cat([runner.forward([each], variant) for each in slices])
    assert torch.equal(together, alone)


def test_another_models_adapter_is_refused(lab: Any, tiny_adapter: TinyAdapter) -> None:
    """Wrong sizes and layers that are not there are named."""
    small, large = lab.reference("llama"), lab.reference("gemma3")
    runner = lab.runner(small)
    with pytest.raises(UnsupportedModelError, match=r"layers\.\d\.\w+\.\w+_proj"):
        runner.read_adapter(str(tiny_adapter(large).folder))
