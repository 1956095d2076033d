"""Which matrices and vectors the decoder reads, and from which of a checkpoint's tensors they are made.

Matrices that read the same input are stacked along their rows (q, k and v; gate and up), so that one
product replaces several. Every precision rounds row by row, so stacking changes no value.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline_engine.mode import Variant
from paceline_engine.model.spec import ModelSpec
from paceline_engine.quant.matrix import packed_bytes

EMBEDDING = "embedding"
OUTPUT = "output"
FINAL_NORM = "final_norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One of the decoder's own weights."""

    name: str
    sources: tuple[str, ...]
    """Tensors of the checkpoint, stacked along their first dimension."""
    shape: tuple[int, ...]


def matrices(spec: ModelSpec) -> tuple[Part, ...]:
    """The matrices that a variant rounds, the output matrix last."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    parts: list[Part] = []

    def add(name: str, layer: int, block: str, sources: str, shape: tuple[int, int]) -> None:
        paths = tuple(f"model.layers.{layer}.{block}.{source}_proj.weight" for source in sources.split())
        parts.append(Part(name=f"layers.{layer}.{name}", sources=paths, shape=shape))

    for layer in range(spec.n_layers):
        add("qkv", layer, "self_attn", "q k v", (q_size + 2 * kv_size, hidden))
        add("o", layer, "self_attn", "o", (hidden, q_size))
        add("gate_up", layer, "mlp", "gate up", (2 * inner, hidden))
        add("down", layer, "mlp", "down", (hidden, inner))
    output = "model.embed_tokens.weight" if spec.tied_embeddings else "lm_head.weight"
    parts.append(Part(name=OUTPUT, sources=(output,), shape=(spec.vocab_size, hidden)))
    return tuple(parts)


def vectors(spec: ModelSpec) -> tuple[Part, ...]:
    """Norms and biases, in fp32 for every variant."""
    hidden = spec.hidden_size
    q_size, kv_size = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    parts: list[Part] = []

    def add(name: str, layer: int, sources: tuple[str, ...], size: int) -> None:
        paths = tuple(f"model.layers.{layer}.{source}" for source in sources)
        parts.append(Part(name=f"layers.{layer}.{name}", sources=paths, shape=(size,)))

    for layer in range(spec.n_layers):
        add("attention_norm", layer, ("input_layernorm.weight",), hidden)
        if spec.sandwich_norms:
            add("post_attention_norm", layer, ("post_attention_layernorm.weight",), hidden)
            add("ffn_norm", layer, ("pre_feedforward_layernorm.weight",), hidden)
            add("post_ffn_norm", layer, ("post_feedforward_layernorm.weight",), hidden)
        else:
            add("ffn_norm", layer, ("post_attention_layernorm.weight",), hidden)
        if spec.qk_norm:
            for head in ("q", "k"):
                add(f"{head}_norm", layer, (f"self_attn.{head}_norm.weight",), spec.head_dim)
        if spec.attention_bias:
            biases = tuple(f"self_attn.{head}_proj.bias" for head in ("q", "k", "v"))
            add("qkv_bias", layer, biases, q_size + 2 * kv_size)
        if spec.output_bias:
            add("o_bias", layer, ("self_attn.o_proj.bias",), hidden)
    parts.append(Part(name=FINAL_NORM, sources=("model.norm.weight",), shape=(hidden,)))
    return tuple(parts)


def embedding(spec: ModelSpec) -> Part:
    """The table that tokens are looked up in; the output matrix has the same source where they are tied."""
    shape = (spec.vocab_size, spec.hidden_size)
    return Part(name=EMBEDDING, sources=("model.embed_tokens.weight",), shape=shape)


def looks_up_output(spec: ModelSpec, variant: Variant) -> bool:
    """Whether the variant looks its tokens up in its own output matrix.

    A rounded one is made for what it multiplies. As inputs its rows would be off by more than rounding to
    the nearest costs: on Gemma 3 270M a third of the perplexity that 4-bit weights lost, and on some texts
    most of what fp8 lost. A step reads one row of the table for each token, so bf16 there costs no time.
    """
    return spec.tied_embeddings and variant in (Variant.FP32, Variant.BF16)


def bytes_per_step(spec: ModelSpec, variant: Variant) -> int:
    """Bytes of weights that a decode step of one token reads: of an embedding of its own only one row."""
    n_bytes = sum(packed_bytes(part.shape[0], part.shape[1], variant) for part in matrices(spec))
    n_bytes += sum(4 * part.shape[0] for part in vectors(spec))
    if not looks_up_output(spec, variant):
        n_bytes += spec.hidden_size * (4 if variant is Variant.FP32 else 2)
    return n_bytes
