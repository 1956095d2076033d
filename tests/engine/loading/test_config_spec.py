"""Configurations of both generations, and what is refused in them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_engine.errors import ModelError, ModelLoadError, UnsupportedModelError
from paceline_engine.loading.config_spec import spec_from_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
}


def test_old_and_new_forms_of_rope_agree() -> None:
    """rope_theta with rope_scaling says what rope_parameters says."""
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    old = spec_from_config(
        "m", {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}}
    )
    new = spec_from_config(
        "m", {**LLAMA, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}}
    )
    assert old == new
    assert (old.rope.scaling, old.rope.original_context, old.rope.theta) == ("llama3", 64, 5e5)


def test_old_gemma_scales_only_its_global_layers() -> None:
    """The 4B's linear scaling leaves the sliding layers alone; the pattern is every sixth layer."""
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
            "sliding_window_pattern": 6,
        },
    }
    spec = spec_from_config("m", config)
    assert spec.local_rope is not None
    assert (spec.rope.scaling, spec.rope.factor, spec.rope.theta) == ("linear", 8.0, 1e6)
    assert (spec.local_rope.scaling, spec.local_rope.theta) == ("default", 1e4)
    assert [index for index, kind in enumerate(spec.layer_kinds) if kind == "full"] == [5, 11, 17, 23, 29]
    assert spec.attention_scale == 256**-0.5
    assert spec.vocab_size == 262_208


@pytest.mark.parametrize(
    ("use", "first", "kinds"),
    [(False, 2, "ffff"), (True, 2, "ffss"), (True, 4, "ffff"), (True, 0, "ssss")],
)
def test_qwen2_slides_from_a_layer_on(use: bool, first: int, kinds: str) -> None:
    """max_window_layers counts the full layers at the bottom, where sliding is on at all."""
    spec = spec_from_config(
        "m",
        {
            **LLAMA,
            "architectures": ["Qwen2ForCausalLM"],
            "use_sliding_window": use,
            "sliding_window": 8,
            "max_window_layers": first,
        },
    )
    assert "".join(kind[0] for kind in spec.layer_kinds) == kinds
    assert spec.sliding_window == (8 if "s" in kinds else None)


def test_mistral_without_a_window_sees_everything() -> None:
    """A window of null means full attention; a field left out means the old default."""
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"]}
    assert spec_from_config("m", {**mistral, "sliding_window": None}).sliding_window is None
    assert spec_from_config("m", mistral).sliding_window == 4096


def test_yarn_has_the_papers_attention_factor() -> None:
    """0.1 ln(s) + 1 where the configuration gives none."""
    spec = spec_from_config(
        "m",
        {
            **LLAMA,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        },
    )
    assert spec.rope.attention_factor == pytest.approx(1.1386294)


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["MixtralForCausalLM"]},
        {"architectures": None},
        {"hidden_act": "relu"},
        {"mlp_bias": True},
        {"final_logit_softcapping": 30.0},
        {"attn_logit_softcapping": 50.0},
        {"quantization_config": {"quant_method": "gptq"}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}},
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"layer_types": ["full_attention", "linear_attention"] * 2},
        {"layer_types": ["full_attention", "sliding_attention"] * 2},
    ],
)
def test_what_would_change_the_maths_is_refused(change: dict[str, Any]) -> None:
    """A field that is not supported is never passed over."""
    with pytest.raises(UnsupportedModelError) as caught:
        spec_from_config("m", {**LLAMA, **change})
    assert "LlamaForCausalLM" in caught.value.remedy or caught.value.remedy


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": "64"},
        {"num_hidden_layers": 10**9},
        {"num_key_value_heads": 3},
        {"head_dim": 15},
        {"rms_norm_eps": float("nan")},
        {"vocab_size": -1},
        {"rope_theta": 0.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 0.0}},
        {"layer_types": ["full_attention"]},
        {"rope_scaling": 5},
    ],
)
def test_absurd_fields_are_refused(change: dict[str, Any]) -> None:
    """Types, sizes and ratios that no decoder has give a load error."""
    with pytest.raises(ModelLoadError):
        spec_from_config("m", {**LLAMA, **change})


_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=4,
)
_KEYS = st.sampled_from(
    [*LLAMA, "rope_scaling", "rope_parameters", "rope_theta", "layer_types", "sliding_window", "head_dim",
     "eos_token_id", "query_pre_attn_scalar", "sliding_window_pattern", "rms_norm_eps", "text_config"]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(["Gemma3ForCausalLM", "Qwen2ForCausalLM", "MistralForCausalLM", "LlamaForCausalLM"]),
    changes=st.dictionaries(_KEYS, _VALUES, min_size=1, max_size=2),
)
def test_no_configuration_escapes_the_tree(name: str, changes: dict[str, Any]) -> None:
    """Whatever the fields hold, the result is a spec or an error of the tree."""
    with contextlib.suppress(ModelError):
        spec_from_config("m", {**LLAMA, "architectures": [name], **changes})
