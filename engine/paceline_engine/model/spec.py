"""What a decoder is made of, read from a checkpoint's own metadata. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class LayerKind(StrEnum):
    FULL = "full"
    SLIDING = "sliding"


class Activation(StrEnum):
    SILU = "silu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding (Su et al., 2021) with the scalings that checkpoints name."""

    theta: float
    scaling: str = "default"
    """``default``, ``linear``, ``llama3`` or ``yarn``."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    frequency_factors: tuple[float, ...] | None = None
    """Per-frequency divisors that a GGUF stores ready-made (``rope_freqs.weight``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One decoder-only transformer; the decoder is driven by this alone."""

    family: str
    """``gemma3``, ``llama``, ``mistral``, ``qwen2`` or ``qwen3``."""
    n_layers: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context_tokens: int
    norm_eps: float
    activation: Activation
    rope: RopeSpec
    """For full-attention layers."""
    local_rope: RopeSpec | None = None
    """For sliding layers, where they differ."""
    layer_kinds: tuple[LayerKind, ...] = ()
    """One a layer."""
    sliding_window: int | None = None
    """A token attends to itself and the ``sliding_window - 1`` before it."""
    tied_embeddings: bool = False
    qk_norm: bool = False
    """RMSNorm over each head of q and k before RoPE."""
    sandwich_norms: bool = False
    """Norms after attention and after the feed-forward too (Gemma)."""
    attention_bias: bool = False
    """Biases on q, k and v (Qwen 2)."""
    output_bias: bool = False
    """A bias on the attention's output projection too (a Llama option)."""
    attention_scale: float = 1.0
    """Multiplies q·k."""
    embedding_scale: float = 1.0
    """Multiplies the embeddings (Gemma: the square root of the hidden size)."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
