"""A checkpoint rounded for the inputs that a text brings."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline_engine.loading import open_checkpoint, open_tokenizer
from paceline_engine.mode import Variant
from paceline_engine.quant import calibrated
from paceline_engine.quant.calibrated import calibration_ids, is_worth_it
from paceline_engine.quant.gptq import gptq_int4
from paceline_engine.quant.matrix import pack
from paceline_engine.quant.store import WeightStore

LOW = pytest.mark.parametrize("variant", [Variant.INT4, Variant.INT8, Variant.FP8])


@pytest.fixture(scope="module")
def checkpoint(tiny_model: Any) -> Any:
    return open_checkpoint(str(tiny_model("llama").safetensors))


def test_a_matrix_is_rounded_for_the_inputs_that_it_gets(checkpoint: Any, tmp_path: Path) -> None:
    """The first matrix is rounded for the normed embeddings of the text, and not as without it."""
    found = WeightStore(checkpoint, directory=tmp_path).matrices(Variant.INT4)["layers.0.qkv"].dequantize()
    ids = torch.tensor([each for sequence in calibration_ids(checkpoint) for each in sequence])
    x = checkpoint.tensor("model.embed_tokens.weight").bfloat16().float()[ids]
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + checkpoint.spec.norm_eps)
    x = x * checkpoint.tensor("model.layers.0.input_layernorm.weight")
    names = [f"model.layers.0.self_attn.{head}_proj.weight" for head in ("q", "k", "v")]
    weight = torch.cat([checkpoint.tensor(name) for name in names]).float()
    expected = gptq_int4(weight, x.T @ x).dequantize()
    assert float((found != expected).float().mean()) < 0.02
    assert float((found != pack(weight, Variant.INT4).dequantize()).float().mean()) > 0.05


def test_a_matrix_is_rounded_for_what_the_rounded_ones_before_it_give(
    checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs of the second matrix come through the first as it was rounded, not as it was."""
    moments: list[Tensor] = []

    def remember(weight: Tensor, moment: Tensor) -> Any:
        moments.append(moment)
        return pack(torch.zeros_like(weight), Variant.INT4)

    monkeypatch.setattr(calibrated, "ROUNDED", {Variant.INT4: remember})
    WeightStore(checkpoint, directory=tmp_path).matrices(Variant.INT4)
    assert len(moments) == 4 * checkpoint.spec.n_layers + 1
    assert moments[0].any()
    assert not moments[1].any()


def test_int8_spends_the_text_on_matrices_with_more_outputs_than_inputs(
    checkpoint: Any, tmp_path: Path
) -> None:
    """Those are not as without a text; the others are, since they would take longest and gain least."""
    found = WeightStore(checkpoint, directory=tmp_path).matrices(Variant.INT8)
    down, output = (
        pack(checkpoint.tensor(name), Variant.INT8).dequantize()
        for name in ("model.layers.0.mlp.down_proj.weight", "lm_head.weight")
    )
    assert torch.equal(found["layers.0.down"].dequantize(), down)
    assert float((found["output"].dequantize() != output).float().mean()) > 0.05


@LOW
def test_the_same_checkpoint_rounds_to_the_same_weights(
    variant: Variant, checkpoint: Any, tmp_path: Path
) -> None:
    """Two conversions agree bit for bit: nothing in them is left to chance."""
    one, two = (WeightStore(checkpoint, directory=tmp_path / name).matrices(variant) for name in "ab")
    assert all(torch.equal(one[name].dequantize(), two[name].dequantize()) for name in one)


def test_large_models_are_rounded_plainly(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only coarse variants of models up to a size are worth the passes."""
    spec = checkpoint.spec
    assert is_worth_it(spec, Variant.INT4)
    assert not is_worth_it(spec, Variant.BF16)
    large = dataclasses.replace(spec, vocab_size=1 + calibrated.MAX_WEIGHTS // spec.hidden_size)
    assert not is_worth_it(large, Variant.INT4)


def test_the_text_is_cut_into_sequences_of_the_context(checkpoint: Any) -> None:
    """Every sequence starts as the model's texts do and fits its context."""
    tokenizer = open_tokenizer(str(checkpoint.path))
    short = dataclasses.replace(checkpoint.spec, context_tokens=40)

    class Short:
        spec = short
        path = checkpoint.path

    sequences = calibration_ids(Short())  # type: ignore[arg-type]
    assert len(sequences) > 10
    assert all(len(each) <= 40 and each[0] == tokenizer.bos_token_id for each in sequences)
    assert "return two of the lamps" in tokenizer.decode(each for ids in sequences for each in ids[1:])


def test_a_checkpoint_without_a_tokenizer_gets_tokens_of_its_vocabulary(checkpoint: Any) -> None:
    """Weights alone are enough: the tokens are then drawn, and the same at every call."""

    class Bare:
        spec = checkpoint.spec
        path = Path("nowhere.gguf")

    sequences = calibration_ids(Bare())  # type: ignore[arg-type]
    assert sequences == calibration_ids(Bare())  # type: ignore[arg-type]
    ids = [each for sequence in sequences for each in sequence]
    assert len(set(ids)) > 20
    assert 0 <= min(ids) <= max(ids) < checkpoint.spec.vocab_size


def test_inputs_that_overflow_do_not_stop_the_rounding(checkpoint: Any, tmp_path: Path) -> None:
    """Weights so large that the pass overflows are rounded plainly from there on."""

    class Huge:
        name, path, digest, spec = "huge", checkpoint.path, "ef" * 32, checkpoint.spec
        tensor_names = checkpoint.tensor_names

        def tensor(self, name: str) -> Tensor:
            value: Tensor = checkpoint.tensor(name)
            return value * 1e25 if "up_proj" in name else value

    found = WeightStore(Huge(), directory=tmp_path).matrices(Variant.INT4)  # type: ignore[arg-type]
    down = pack(checkpoint.tensor("model.layers.0.mlp.down_proj.weight"), Variant.INT4)
    assert torch.equal(found["layers.0.down"].dequantize(), down.dequantize())
