"""A ModelSpec from a GGUF's metadata, with the meaning that llama.cpp gives to each key."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from paceline_engine.errors import ModelLoadError, UnsupportedModelError
from paceline_engine.loading.gguf_header import GgufHeader
from paceline_engine.loading.layout import MAX_LAYERS, check_spec
from paceline_engine.model.spec import Activation, LayerKind, ModelSpec, RopeSpec

ARCHITECTURES = ("gemma3", "llama", "qwen2", "qwen3")

_GEMMA_PATTERN = 6
"""Every sixth layer of Gemma 3 attends to the whole context."""
_GEMMA_27B_LAYERS = 62
"""Gemma 3 27B alone scales attention by hidden_size / n_heads; llama.cpp knows it by its layers."""
_END_PIECES = ("<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>")
_NEUTRAL: tuple[tuple[str, frozenset[object]], ...] = (
    ("attn_logit_softcapping", frozenset({0.0})),
    ("final_logit_softcapping", frozenset({0.0})),
    ("router_logit_softcapping", frozenset({0.0})),
    ("expert_count", frozenset({0})),
    ("attention.causal", frozenset({True})),
    ("attention.clamp_kqv", frozenset({0.0})),
    ("attention.max_alibi_bias", frozenset({0.0})),
    ("attention.temperature_scale", frozenset({0.0})),
    ("attention.output_scale", frozenset({0.0, 1.0})),
    ("logit_scale", frozenset({0.0, 1.0})),
    ("residual_scale", frozenset({0.0, 1.0})),
    ("embedding_scale", frozenset({0.0, 1.0})),
    ("use_parallel_residual", frozenset({False})),
    ("rope.scaling.alpha", frozenset({0.0})),
    ("rope.scaling.yarn_log_multiplier", frozenset({0.0})),
    ("rope.scaling.yarn_ext_factor", frozenset({-1.0, 1.0})),
)
"""Keys that would change the maths, with the values at which they do not."""


def spec_from_gguf(header: GgufHeader, frequency_factors: tuple[float, ...] | None) -> ModelSpec:
    """Read the spec; ``frequency_factors`` are the values of ``rope_freqs.weight``, where there is one.

    Raises:
        ModelLoadError: a key is missing, of another type or absurd.
        UnsupportedModelError: an architecture or option that is not supported.
    """
    arch = header.get("general.architecture", str)
    if arch not in ARCHITECTURES:
        raise _unsupported(header, f"architecture '{arch}' is not supported")
    for key, neutral in _NEUTRAL:
        value = header.metadata.get(f"{arch}.{key}")
        if value is not None and value not in neutral:
            raise _unsupported(header, f"'{arch}.{key}' is {value}, which is not supported")
    spec = _spec(header, arch, frequency_factors)
    check_spec(str(header.path), spec)
    return spec


def _spec(header: GgufHeader, arch: str, frequency_factors: tuple[float, ...] | None) -> ModelSpec:
    def number(key: str, default: int | None = None) -> int:
        return header.get(f"{arch}.{key}", int, default)

    gemma = arch == "gemma3"
    n_layers, hidden = number("block_count"), number("embedding_length")
    if not 1 <= n_layers <= MAX_LAYERS:
        raise _damaged(header, f"'{arch}.block_count' is {n_layers}, 1 to {MAX_LAYERS} are possible")
    n_heads = _per_layer(header, f"{arch}.attention.head_count")
    n_kv_heads = _per_layer(header, f"{arch}.attention.head_count_kv", n_heads)
    head_dim = number("attention.key_length", hidden // max(1, n_heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if number(key, head_dim) != head_dim:
            raise _unsupported(header, f"'{arch}.{key}' is {number(key)} beside heads of {head_dim}")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError(
            str(header.path),
            tensor="token_embd.weight",
            reason="is missing or no matrix",
            remedy="use a GGUF that holds a whole model",
        )
    kinds, window = _windows(header, arch, n_layers)
    scale = header.get(f"{arch}.attention.scale", float, 0.0)
    if not scale:
        width = hidden / max(1, n_heads) if gemma and n_layers == _GEMMA_27B_LAYERS else head_dim
        scale = max(1.0, width) ** -0.5
    return ModelSpec(
        family="mistral" if arch == "llama" and window is not None else arch,
        n_layers=n_layers,
        hidden_size=hidden,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        intermediate_size=_per_layer(header, f"{arch}.feed_forward_length"),
        vocab_size=embedding.shape[0],
        context_tokens=number("context_length"),
        norm_eps=header.get(f"{arch}.attention.layer_norm_rms_epsilon", float),
        activation=Activation.GELU_TANH if gemma else Activation.SILU,
        rope=_rope(header, arch, frequency_factors),
        local_rope=_local_rope(header, arch) if gemma else None,
        layer_kinds=kinds,
        sliding_window=window,
        tied_embeddings="output.weight" not in header.tensors,
        qk_norm=arch in ("gemma3", "qwen3"),
        sandwich_norms=gemma,
        attention_bias="blk.0.attn_q.bias" in header.tensors,
        output_bias="blk.0.attn_output.bias" in header.tensors,
        attention_scale=scale,
        embedding_scale=math.sqrt(max(1, hidden)) if gemma else 1.0,
        bos_token_id=bos_token_id(header),
        eos_token_ids=end_token_ids(header),
    )


def bos_token_id(header: GgufHeader) -> int | None:
    """The token that starts every sequence; None where the model has none (Qwen names one unused)."""
    if "tokenizer.ggml.bos_token_id" not in header.metadata:
        return None
    pre = header.get("tokenizer.ggml.pre", str, "default")
    sentencepiece = header.get("tokenizer.ggml.model", str, "llama") == "llama"
    adds = header.get(
        "tokenizer.ggml.add_bos_token", bool, sentencepiece or pre in ("llama-bpe", "llama3", "llama-v3")
    )
    template = header.metadata.get("tokenizer.chat_template")
    writes = isinstance(template, str) and "bos_token" in template
    return header.get("tokenizer.ggml.bos_token_id", int) if adds or writes else None


def end_token_ids(
    header: GgufHeader, control_id: Callable[[str], int | None] | None = None
) -> tuple[int, ...]:
    """The end tokens that the metadata names, and the turn's ends that llama.cpp knows by their text.

    ``control_id`` finds a control token by its text; without it the vocabulary is read for that.
    """
    named = [
        header.get(key, int)
        for key in (
            "tokenizer.ggml.eos_token_id",
            "tokenizer.ggml.eot_token_id",
            "tokenizer.ggml.eom_token_id",
        )
        if key in header.metadata
    ]
    if control_id is None:
        control_id = _control_tokens(header).get
    found = [token_id for piece in _END_PIECES if (token_id := control_id(piece)) is not None]
    return tuple(dict.fromkeys(named + found))


def _control_tokens(header: GgufHeader) -> dict[str, int]:
    kinds = header.metadata.get("tokenizer.ggml.token_type")
    if "tokenizer.ggml.tokens" not in header.metadata or not isinstance(kinds, tuple):
        return {}
    pieces = header.strings("tokenizer.ggml.tokens")
    return {piece: index for index, (piece, kind) in enumerate(zip(pieces, kinds, strict=False)) if kind == 3}


def _windows(header: GgufHeader, arch: str, n_layers: int) -> tuple[tuple[LayerKind, ...], int | None]:
    window = header.get(f"{arch}.attention.sliding_window", int, 0)
    if not window or arch.startswith("qwen"):
        if arch == "gemma3":
            raise _damaged(header, "metadata 'gemma3.attention.sliding_window' is missing")
        if window:
            raise _unsupported(header, f"'{arch}.attention.sliding_window' is {window}")
        return (LayerKind.FULL,) * n_layers, None
    if arch == "llama":
        return (LayerKind.SLIDING,) * n_layers, window
    pattern = header.metadata.get(f"{arch}.attention.sliding_window_pattern", _GEMMA_PATTERN)
    if type(pattern) is int and pattern > 0:
        sliding: Sequence[object] = [bool((index + 1) % pattern) for index in range(n_layers)]
    elif isinstance(pattern, tuple) and len(pattern) >= n_layers:
        sliding = pattern[:n_layers]
    else:
        raise _damaged(header, f"'{arch}.attention.sliding_window_pattern' is {pattern!r}")
    return tuple(LayerKind.SLIDING if yes else LayerKind.FULL for yes in sliding), window


def _rope(header: GgufHeader, arch: str, frequency_factors: tuple[float, ...] | None) -> RopeSpec:
    def number(key: str, default: float | None = None) -> float:
        return header.get(f"{arch}.rope.{key}", float, default)

    theta = number("freq_base", 10_000.0)
    scaling = header.get(f"{arch}.rope.scaling.type", str, "none")
    if scaling in ("none", ""):
        old_factor = number("scale_linear", 1.0)
        return RopeSpec(
            theta=theta,
            scaling="default" if old_factor == 1 else "linear",
            factor=old_factor,
            frequency_factors=frequency_factors,
        )
    if scaling not in ("linear", "yarn"):
        raise _unsupported(header, f"RoPE scaling '{scaling}' is not supported")
    factor = number("scaling.factor")
    if scaling == "linear":
        return RopeSpec(theta=theta, scaling="linear", factor=factor, frequency_factors=frequency_factors)
    if frequency_factors is not None:
        raise _unsupported(header, "RoPE scaling 'yarn' with frequency factors is not supported")
    context = header.get(f"{arch}.context_length", int)
    # llama.cpp: a factor of the file's multiplies YaRN's own 0.1 ln(s) + 1 (Peng et al., 2023)
    own = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    given = number("scaling.attn_factor", 1.0) * number("scaling.yarn_attn_factor", 1.0)
    return RopeSpec(
        theta=theta,
        scaling="yarn",
        factor=factor,
        original_context=header.get(f"{arch}.rope.scaling.original_context_length", int, context),
        attention_factor=own * given,
        beta_fast=number("scaling.yarn_beta_fast", 32.0),
        beta_slow=number("scaling.yarn_beta_slow", 1.0),
    )


def _local_rope(header: GgufHeader, arch: str) -> RopeSpec:
    """Gemma 3's sliding layers: their own base, and never a scaling."""
    return RopeSpec(theta=header.get(f"{arch}.rope.freq_base_swa", float, 10_000.0))


def _per_layer(header: GgufHeader, key: str, default: int | None = None) -> int:
    """A number that a file may also give for each layer, as long as all are equal."""
    value = header.metadata.get(key)
    if isinstance(value, tuple) and value:
        if len(set(value)) > 1 or type(value[0]) is not int:
            raise _unsupported(header, f"'{key}' differs between layers")
        return int(value[0])
    return header.get(key, int, default)


def _unsupported(header: GgufHeader, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        str(header.path),
        reason=reason,
        remedy=f"use a GGUF of {', '.join(ARCHITECTURES)} (Mistral is among 'llama')",
    )


def _damaged(header: GgufHeader, reason: str) -> ModelLoadError:
    return ModelLoadError(str(header.path), reason=reason, remedy="fetch or convert the model again")
