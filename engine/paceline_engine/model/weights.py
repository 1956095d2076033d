"""One variant's weights, as the decoder reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline_engine.cuda.support import Support, place
from paceline_engine.mode import Variant
from paceline_engine.model.spec import ModelSpec
from paceline_engine.quant import layout
from paceline_engine.quant.matrix import Matrix, to_device


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerWeights:
    attention_norm: Tensor
    """fp32 [hidden], before attention."""
    qkv: Matrix
    """[(n_heads + 2 * n_kv_heads) * head_dim, hidden]"""
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    """fp32 [head_dim]"""
    k_norm: Tensor | None
    o: Matrix
    """[hidden, n_heads * head_dim]"""
    o_bias: Tensor | None
    post_attention_norm: Tensor | None
    ffn_norm: Tensor
    """fp32 [hidden], before the feed-forward."""
    gate_up: Matrix
    """[2 * intermediate, hidden], gate first."""
    down: Matrix
    """[hidden, intermediate]"""
    post_ffn_norm: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecoderWeights:
    embedding: Matrix
    """[vocab, hidden]; may be the output matrix itself."""
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    output: Matrix
    """[vocab, hidden]"""

    @property
    def bytes_per_step(self) -> int:
        """Bytes of weights that a decode step of one token reads: of an embedding of its own only one row."""
        matrices = [self.output]
        vectors = [self.final_norm]
        for layer in self.layers:
            for name in LayerWeights.__dataclass_fields__:
                value: object = getattr(layer, name)
                if isinstance(value, Tensor):
                    vectors.append(value)
                elif value is not None:
                    matrices.append(getattr(layer, name))
        n_bytes = sum(matrix.n_bytes for matrix in matrices)
        n_bytes += sum(vector.numel() * vector.element_size() for vector in vectors)
        if self.embedding is not self.output:
            n_bytes += self.embedding.n_bytes // self.embedding.shape[0]
        return n_bytes

    @classmethod
    def assemble(
        cls,
        spec: ModelSpec,
        variant: Variant,
        *,
        matrices: Mapping[str, Matrix],
        vectors: Mapping[str, Tensor],
        embedding: Matrix | None,
        device: torch.device,
        support: Support | None = None,
    ) -> DecoderWeights:
        """Order the parts of ``quant.layout`` by layer.

        Args:
            embedding: already on the device; None where tokens are looked up in the output matrix.
            support: what the device multiplies well; None for the CPU's kernels.
        """
        placed = {name: to_device(matrix, variant, device) for name, matrix in matrices.items()}
        if support is not None:
            placed = {name: place(matrix, support) for name, matrix in placed.items()}

        def layer(index: int) -> LayerWeights:
            def vector(name: str) -> Tensor | None:
                return vectors.get(f"layers.{index}.{name}")

            return LayerWeights(
                attention_norm=vectors[f"layers.{index}.attention_norm"],
                qkv=placed[f"layers.{index}.qkv"],
                qkv_bias=vector("qkv_bias"),
                q_norm=vector("q_norm"),
                k_norm=vector("k_norm"),
                o=placed[f"layers.{index}.o"],
                o_bias=vector("o_bias"),
                post_attention_norm=vector("post_attention_norm"),
                ffn_norm=vectors[f"layers.{index}.ffn_norm"],
                gate_up=placed[f"layers.{index}.gate_up"],
                down=placed[f"layers.{index}.down"],
                post_ffn_norm=vector("post_ffn_norm"),
            )

        output = placed[layout.OUTPUT]
        return cls(
            embedding=output if embedding is None else embedding,
            layers=tuple(layer(index) for index in range(spec.n_layers)),
            final_norm=vectors[layout.FINAL_NORM],
            output=output,
        )
