"""Which tensors a decoder of a given spec is made of, and the limits that keep a spec sane."""

from __future__ import annotations

import math
from collections.abc import Mapping

from paceline_engine.errors import ModelLoadError, UnsupportedModelError
from paceline_engine.model.spec import LayerKind, ModelSpec, RopeSpec

MAX_LAYERS = 1024
MAX_SIZE = 1 << 24
SUPPORTED = (
    "Gemma3ForCausalLM, Gemma3ForConditionalGeneration (its text part), LlamaForCausalLM, "
    "MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"
)


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name to shape of every tensor that the decoder reads."""
    hidden, feed = spec.hidden_size, spec.intermediate_size
    q_rows, kv_rows = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_rows, hidden),
        "self_attn.k_proj.weight": (kv_rows, hidden),
        "self_attn.v_proj.weight": (kv_rows, hidden),
        "self_attn.o_proj.weight": (hidden, q_rows),
        "mlp.gate_proj.weight": (feed, hidden),
        "mlp.up_proj.weight": (feed, hidden),
        "mlp.down_proj.weight": (hidden, feed),
    }
    if spec.sandwich_norms:
        layer["pre_feedforward_layernorm.weight"] = (hidden,)
        layer["post_feedforward_layernorm.weight"] = (hidden,)
    if spec.qk_norm:
        layer["self_attn.q_norm.weight"] = (spec.head_dim,)
        layer["self_attn.k_norm.weight"] = (spec.head_dim,)
    if spec.attention_bias:
        layer["self_attn.q_proj.bias"] = (q_rows,)
        layer["self_attn.k_proj.bias"] = (kv_rows,)
        layer["self_attn.v_proj.bias"] = (kv_rows,)
    if spec.output_bias:
        layer["self_attn.o_proj.bias"] = (hidden,)
    expected: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not spec.tied_embeddings:
        expected["lm_head.weight"] = (spec.vocab_size, hidden)
    for index in range(spec.n_layers):
        expected |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return expected


def check_tensors(model: str, spec: ModelSpec, found: Mapping[str, tuple[int, ...]]) -> None:
    """Compare a file's tensors with what the spec needs.

    Raises:
        ModelLoadError: one is absent or has another shape.
        UnsupportedModelError: one is there that the decoder would leave out.
    """
    expected = expected_tensors(spec)
    for name, shape in expected.items():
        if name not in found:
            raise ModelLoadError(
                model, tensor=name, reason="is missing", remedy="fetch or convert the model again"
            )
        if found[name] != shape:
            raise ModelLoadError(
                model,
                tensor=name,
                reason=f"has shape {list(found[name])}, the model's configuration needs {list(shape)}",
                remedy="fetch or convert the model again",
            )
    for name in found:
        if name not in expected:
            raise UnsupportedModelError(
                model,
                tensor=name,
                reason=f"is not part of a {spec.family} decoder as it is supported",
                remedy=f"use a plain checkpoint of {SUPPORTED}",
            )


def check_spec(model: str, spec: ModelSpec) -> None:
    """Refuse sizes that no decoder has.

    Raises:
        ModelLoadError: a size is absurd, or sizes do not fit each other.
    """

    def need(ok: bool, reason: str) -> None:
        if not ok:
            raise ModelLoadError(model, reason=reason, remedy="fetch or convert the model again")

    need(1 <= spec.n_layers <= MAX_LAYERS, f"has {spec.n_layers} layers, 1 to {MAX_LAYERS} are possible")
    for name in (
        "hidden_size", "n_heads", "n_kv_heads", "head_dim", "intermediate_size", "vocab_size",
        "context_tokens",
    ):  # fmt: skip
        size = getattr(spec, name)
        need(1 <= size <= MAX_SIZE, f"{name} is {size}, 1 to {MAX_SIZE} are possible")
    need(
        spec.n_heads % spec.n_kv_heads == 0,
        f"{spec.n_heads} query heads do not divide into {spec.n_kv_heads} key heads",
    )
    need(spec.head_dim % 2 == 0, f"head_dim is {spec.head_dim} and RoPE needs an even number")
    for name in ("norm_eps", "attention_scale", "embedding_scale"):
        value = getattr(spec, name)
        need(math.isfinite(value) and value > 0, f"{name} is {value} and must be above 0")
    need(
        len(spec.layer_kinds) == spec.n_layers, f"{len(spec.layer_kinds)} layer types, {spec.n_layers} layers"
    )
    if LayerKind.SLIDING in spec.layer_kinds:
        window = spec.sliding_window
        need(window is not None and window >= 1, f"sliding_window is {window} and must be at least 1")
    for rope in (spec.rope, spec.local_rope):
        if rope is not None:
            reason = _rope_fault(rope, spec.head_dim)
            need(reason is None, f"RoPE: {reason}")


def _rope_fault(rope: RopeSpec, head_dim: int) -> str | None:
    for name in ("theta", "factor", "beta_fast", "beta_slow", "high_freq_factor", "low_freq_factor"):
        value = getattr(rope, name)
        if not (math.isfinite(value) and value > 0):
            return f"{name} is {value} and must be above 0"
    if rope.theta <= 1:
        return f"theta is {rope.theta} and must be above 1"
    if rope.scaling in ("llama3", "yarn") and rope.original_context < 1:
        return f"the original context is {rope.original_context} and must be at least 1"
    if rope.scaling == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        return f"low_freq_factor {rope.low_freq_factor} is not below high_freq_factor {rope.high_freq_factor}"
    if rope.attention_factor is not None and not (
        math.isfinite(rope.attention_factor) and rope.attention_factor > 0
    ):
        return f"attention_factor is {rope.attention_factor} and must be above 0"
    factors = rope.frequency_factors
    if factors is not None and (
        len(factors) != head_dim // 2 or not all(math.isfinite(value) and value > 0 for value in factors)
    ):
        return f"{len(factors)} frequency factors, {head_dim // 2} positive numbers are needed"
    return None
