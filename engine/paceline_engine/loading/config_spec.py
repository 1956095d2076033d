"""A ModelSpec from a ``config.json``, as the transformers implementations read it.

Both the forms of transformers 5 (``rope_parameters``, ``layer_types``) and the older ones (``rope_theta``,
``rope_scaling``, ``sliding_window_pattern``) are read. A field that would change the maths and is not
supported is refused, never passed over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from paceline_engine.errors import ModelLoadError, UnsupportedModelError
from paceline_engine.loading.layout import MAX_LAYERS, SUPPORTED, check_spec
from paceline_engine.model.spec import Activation, LayerKind, ModelSpec, RopeSpec

FAMILIES: Mapping[str, str] = {
    "Gemma3ForCausalLM": "gemma3",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_WITH_TEXT_PART = "Gemma3ForConditionalGeneration"
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131_072},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096, "max_position_embeddings": 32_768},
    "qwen3": {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_position_embeddings": 32_768,
    },
}
"""What a configuration that leaves a field out means by it."""
_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None, 0),
    "final_logit_softcapping": (None, 0),
    "use_bidirectional_attention": (None, False),
    "is_causal": (None, True),
    "mlp_bias": (None, False),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1),
    "attention_chunk_size": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "logits_scaling": (None, 1),
    "no_rope_layers": (None, []),
    "num_local_experts": (None, 0),
    "num_experts": (None, 0),
    "add_cross_attention": (None, False),
}
"""Fields that would change the maths, with the values at which they do not."""
_ROPE_FIELDS = frozenset(
    (
        "rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor",
        "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate", "partial_rotary_factor", "finetuned",
    )
)  # fmt: skip

T = TypeVar("T")


def spec_from_config(
    model: str, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
) -> ModelSpec:
    """Read the spec; ``generation`` is ``generation_config.json``, which may name more end tokens.

    Raises:
        ModelLoadError: a field is missing, of another type or absurd.
        UnsupportedModelError: an architecture or option that is not supported.
    """
    family = _family(model, config)
    if _WITH_TEXT_PART in _architectures(config):
        text = config.get("text_config")
        if not isinstance(text, Mapping):
            raise _damaged(model, "'text_config' is missing")
        shared = {key: config[key] for key in ("tie_word_embeddings", "eos_token_id") if key in config}
        config = shared | dict(text)
    reader = _Config(model=model, fields={**_DEFAULTS[family], **config})
    for key, neutral in _NEUTRAL.items():
        value = config.get(key)
        if not any(value == allowed for allowed in neutral):
            raise _unsupported(model, f"'{key}' is {value!r}, which is not supported")
    spec = _spec(reader, family, generation or {})
    check_spec(model, spec)
    return spec


def _architectures(config: Mapping[str, Any]) -> Sequence[Any]:
    found = config.get("architectures")
    return found if isinstance(found, list) else ()


def _family(model: str, config: Mapping[str, Any]) -> str:
    names = _architectures(config)
    for name in names:
        if name == _WITH_TEXT_PART:
            return "gemma3"
        if isinstance(name, str) and name in FAMILIES:
            return FAMILIES[name]
    seen = ", ".join(str(name) for name in names) or f"model type '{config.get('model_type')}'"
    raise UnsupportedModelError(model, reason=f"{seen} is not supported", remedy=f"supported are {SUPPORTED}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Config:
    model: str
    fields: Mapping[str, Any]

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        value = self.fields.get(key)
        if value is None:
            value = default
        if kind is float and type(value) is int:
            value = float(value)
        if value is None:
            raise _damaged(self.model, f"'{key}' is missing")
        if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
            raise _damaged(self.model, f"'{key}' is {str(value)[:40]!r} and not a valid {kind.__name__}")
        return value


def _spec(config: _Config, family: str, generation: Mapping[str, Any]) -> ModelSpec:
    gemma = family == "gemma3"
    n_layers, hidden = config.get("num_hidden_layers", int), config.get("hidden_size", int)
    if not 1 <= n_layers <= MAX_LAYERS:
        raise _damaged(config.model, f"'num_hidden_layers' is {n_layers}, 1 to {MAX_LAYERS} are possible")
    n_heads = config.get("num_attention_heads", int)
    head_dim = config.get("head_dim", int, hidden // max(1, n_heads))
    kinds, window = _windows(config, family, n_layers)
    rope, local_rope = _ropes(config, family)
    scalar = config.get("query_pre_attn_scalar", float) if gemma else float(head_dim)
    bias = family == "qwen2" or config.get("attention_bias", bool, False)
    if family == "mistral" and bias:
        raise _unsupported(config.model, "'attention_bias' is set, which Mistral does not have")
    return ModelSpec(
        family=family,
        n_layers=n_layers,
        hidden_size=hidden,
        n_heads=n_heads,
        n_kv_heads=config.get("num_key_value_heads", int, n_heads),
        head_dim=head_dim,
        intermediate_size=config.get("intermediate_size", int),
        vocab_size=config.get("vocab_size", int),
        context_tokens=config.get("max_position_embeddings", int),
        norm_eps=config.get("rms_norm_eps", float, 1e-6),
        activation=_activation(config, gemma),
        rope=rope,
        local_rope=local_rope,
        layer_kinds=kinds,
        sliding_window=window,
        tied_embeddings=config.get("tie_word_embeddings", bool, False),
        qk_norm=family in ("gemma3", "qwen3"),
        sandwich_norms=gemma,
        attention_bias=bias,
        output_bias=bias and family != "qwen2",
        attention_scale=max(scalar, 1e-9) ** -0.5,
        embedding_scale=math.sqrt(max(1, hidden)) if gemma else 1.0,
        bos_token_id=config.get("bos_token_id", int, -1)
        if config.fields.get("bos_token_id") is not None
        else None,
        eos_token_ids=token_ids(generation.get("eos_token_id"), config.fields.get("eos_token_id")),
    )


def token_ids(*values: Any) -> tuple[int, ...]:
    """The ids among fields that hold one, several or none."""
    found: dict[int, None] = {}
    for value in values:
        for one in value if isinstance(value, list) else [value]:
            if type(one) is int and one >= 0:
                found[one] = None
    return tuple(found)


def _activation(config: _Config, gemma: bool) -> Activation:
    key = "hidden_activation" if gemma else "hidden_act"
    name = config.get(key, str, "silu")
    if name not in _ACTIVATIONS:
        raise _unsupported(
            config.model, f"'{key}' is {name!r}; supported are {', '.join(sorted(_ACTIVATIONS))}"
        )
    return _ACTIVATIONS[name]


def _windows(config: _Config, family: str, n_layers: int) -> tuple[tuple[LayerKind, ...], int | None]:
    window = config.fields.get("sliding_window")
    if family == "llama" or (family.startswith("qwen") and not config.get("use_sliding_window", bool, False)):
        window = None
    if window is not None:
        window = config.get("sliding_window", int)
    if family == "gemma3":
        pattern = config.get("sliding_window_pattern", int, config.get("_sliding_window_pattern", int, 6))
        if pattern < 1:
            raise _damaged(config.model, f"'sliding_window_pattern' is {pattern} and must be at least 1")
        sliding = [bool((index + 1) % pattern) for index in range(n_layers)]
    elif family.startswith("qwen"):
        first = config.get("max_window_layers", int, 28)
        sliding = [window is not None and index >= first for index in range(n_layers)]
    else:
        sliding = [window is not None] * n_layers
    implied = tuple(LayerKind.SLIDING if yes else LayerKind.FULL for yes in sliding)
    kinds = _layer_types(config, implied)
    if family in ("llama", "mistral") and kinds != implied:
        raise _unsupported(config.model, f"'layer_types' that mix attention are not part of {family}")
    return kinds, window if LayerKind.SLIDING in kinds else None


def _layer_types(config: _Config, implied: tuple[LayerKind, ...]) -> tuple[LayerKind, ...]:
    given = config.fields.get("layer_types")
    if given is None:
        return implied
    names = {"full_attention": LayerKind.FULL, "sliding_attention": LayerKind.SLIDING}
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise _damaged(config.model, "'layer_types' is no list of names")
    if len(given) != len(implied):
        raise _damaged(config.model, f"has {len(given)} 'layer_types' for {len(implied)} layers")
    if unknown := sorted(set(given) - set(names)):
        raise _unsupported(config.model, f"layer type '{unknown[0]}' is not supported")
    return tuple(names[name] for name in given)


def _ropes(config: _Config, family: str) -> tuple[RopeSpec, RopeSpec | None]:
    parameters = config.fields.get("rope_parameters")
    old = config.fields.get("rope_scaling")
    for name, value in (("rope_parameters", parameters), ("rope_scaling", old)):
        if value is not None and not isinstance(value, Mapping):
            raise _damaged(config.model, f"'{name}' is no object")
    theta = config.get("rope_theta", float, 1_000_000.0 if family == "gemma3" else 10_000.0)
    given: Mapping[str, Any] = {**(parameters or {}), **(old or {})}
    if family != "gemma3":
        return _rope(config, given, theta), None
    local_theta = config.get("rope_local_base_freq", float, 10_000.0)
    nested = parameters or {}
    if parameters and not {"full_attention", "sliding_attention"} & set(parameters):
        raise _unsupported(config.model, "'rope_parameters' without layer types is not part of Gemma 3")
    full = {**(nested.get("full_attention") or {}), **(old or {})}
    return _rope(config, full, theta), _rope(config, nested.get("sliding_attention") or {}, local_theta)


def _rope(config: _Config, given: Mapping[str, Any], theta: float) -> RopeSpec:
    """One set of RoPE parameters; the theta among them goes first."""
    reader = _Config(model=config.model, fields={**given, "partial_rotary_factor": None})
    kind = given.get("rope_type", given.get("type")) or "default"
    if unknown := sorted(set(given) - _ROPE_FIELDS):
        raise _unsupported(config.model, f"RoPE field '{unknown[0]}' is not supported")
    if given.get("partial_rotary_factor") not in (None, 1):
        raise _unsupported(config.model, "RoPE over a part of each head is not supported")
    theta = reader.get("rope_theta", float, theta)
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind not in ("linear", "llama3", "yarn"):
        raise _unsupported(config.model, f"RoPE type {kind!r} is not supported")
    context = config.get("max_position_embeddings", int)
    outer = config.get("original_max_position_embeddings", int, 0)
    original = outer or reader.get("original_max_position_embeddings", int, context)
    factor = reader.get("factor", float, context / max(1, original) if kind == "yarn" else None)
    if kind == "linear":
        return RopeSpec(theta=theta, scaling="linear", factor=factor)
    if kind == "llama3":
        return RopeSpec(
            theta=theta,
            scaling="llama3",
            factor=factor,
            low_freq_factor=reader.get("low_freq_factor", float),
            high_freq_factor=reader.get("high_freq_factor", float),
            original_context=original,
        )
    if given.get("truncate") is False:
        raise _unsupported(config.model, "YaRN with 'truncate' false is not supported")
    return RopeSpec(
        theta=theta,
        scaling="yarn",
        factor=factor,
        original_context=original,
        attention_factor=_yarn_attention_factor(reader, factor),
        beta_fast=reader.get("beta_fast", float, 32.0),
        beta_slow=reader.get("beta_slow", float, 1.0),
    )


def _yarn_attention_factor(reader: _Config, factor: float) -> float:
    """Given, or 0.1 m ln(s) + 1 (Peng et al., 2023), a ratio of two where DeepSeek's fields say so."""

    def grown(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0

    given = reader.get("attention_factor", float, 0.0)
    if given:
        return given
    m, m_all = reader.get("mscale", float, 0.0), reader.get("mscale_all_dim", float, 0.0)
    return grown(m) / grown(m_all) if m and m_all else grown(1.0)


def _unsupported(model: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(model, reason=reason, remedy=f"use a plain checkpoint of {SUPPORTED}")


def _damaged(model: str, reason: str) -> ModelLoadError:
    return ModelLoadError(model, reason=f"config.json: {reason}", remedy="fetch the model again")
