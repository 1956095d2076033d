"""RoPE and its scalings against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline_engine.errors import UnsupportedModelError
from paceline_engine.mode import Variant
from paceline_engine.model.rope import Rope
from paceline_engine.model.spec import RopeSpec

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn, factor named": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.3,
    },
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("length", [1, 80])
def test_scaled_logits_match_the_reference(name: str, length: int, lab: Any) -> None:
    """Position 0 alone, and positions past the original context of 32, match transformers."""
    model = lab.build_reference("llama", rope_parameters=SCALINGS[name])
    ids = lab.random_ids(length, seed=3)
    runner = lab.runner(model, n_blocks=32)
    owner = type(lab.scattered(0))(blocks=tuple(range(31, -1, -1)))
    logits = runner.forward([owner.piece(ids, 0)], Variant.FP32)
    torch.testing.assert_close(logits, lab.reference_logits(model, ids), rtol=0.0, atol=1e-3)


def test_scalings_change_the_logits(lab: Any) -> None:
    """Every scaling is seen in the logits, so that the comparisons above can fail."""
    ids = lab.random_ids(80, seed=3)
    plain = lab.reference_logits(lab.build_reference("llama", rope_parameters=SCALINGS["default"]), ids)
    for name in ("linear", "llama3", "yarn"):
        scaled = lab.reference_logits(lab.build_reference("llama", rope_parameters=SCALINGS[name]), ids)
        assert (scaled - plain).abs().max() > 0.1


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_frequencies_match_the_reference(name: str, head_dim: int, lab: Any) -> None:
    """The table of frequencies at the sizes of real models is that of transformers."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = dict(SCALINGS[name])
    if "original_max_position_embeddings" in parameters:
        parameters["original_max_position_embeddings"] = 8192
    config = LlamaConfig(
        hidden_size=head_dim * 4,
        num_attention_heads=4,
        max_position_embeddings=65536,
        rope_parameters=parameters,
    )
    positions = torch.tensor([0, 1, 17, 8191, 8192, 60000])
    expected = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    spec = RopeSpec(
        theta=parameters["rope_theta"],
        scaling=parameters["rope_type"],
        factor=parameters.get("factor", 1.0),
        original_context=parameters.get("original_max_position_embeddings", 0),
        attention_factor=parameters.get("attention_factor"),
    )
    found = Rope.build(spec, head_dim=head_dim, device=torch.device("cpu")).at(positions)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs[0, :, : head_dim // 2], rtol=0.0, atol=5e-3)
        torch.testing.assert_close(ours[:3], theirs[0, :3, : head_dim // 2], rtol=0.0, atol=1e-5)


def test_frequency_factors_divide_the_frequencies() -> None:
    """The factors that a GGUF stores give what the scaling that they were made from gives."""
    device = torch.device("cpu")
    scaled = RopeSpec(theta=500000.0, scaling="llama3", factor=8.0, original_context=8192)
    plain = Rope.build(RopeSpec(theta=500000.0), head_dim=64, device=device)
    wanted = Rope.build(scaled, head_dim=64, device=device)
    factors = tuple((plain.frequencies / wanted.frequencies).tolist())
    found = Rope.build(RopeSpec(theta=500000.0, frequency_factors=factors), head_dim=64, device=device)
    torch.testing.assert_close(found.frequencies, wanted.frequencies)


def test_an_unknown_scaling_is_refused() -> None:
    """A scaling that is not read is named in the error."""
    with pytest.raises(UnsupportedModelError, match="longrope"):
        Rope.build(RopeSpec(theta=1e4, scaling="longrope"), head_dim=8, device=torch.device("cpu"))
