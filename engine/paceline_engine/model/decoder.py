"""One decoder for every family that is read: Gemma 3, Llama, Mistral, Qwen 2 and Qwen 3.

Pre-norm transformer (Vaswani et al., 2017) with grouped-query attention (Ainslie et al., 2023), RMSNorm
(Zhang and Sennrich, 2019), rotary positions and gated feed-forwards (Shazeer, 2020); what differs between
the families is in ``ModelSpec``. Activations and the residual stream are fp32 in every variant.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline_engine import kernels
from paceline_engine.model.adapter import AdaptedRows
from paceline_engine.model.batch import PackedBatch
from paceline_engine.model.kv import PagedKV
from paceline_engine.model.ops import attention, linear
from paceline_engine.model.rope import Rope
from paceline_engine.model.spec import LayerKind, ModelSpec
from paceline_engine.model.weights import DecoderWeights, LayerWeights
from paceline_engine.quant.matrix import Matrix

Multiply = Callable[[Tensor, Matrix], Tensor]
"""fp32 x [M, K] and a matrix [N, K] to x @ matrix.T, fp32 [M, N]."""


class Decoder:
    """Runs packed tokens through the layers of one spec, with the weights of any variant."""

    def __init__(self, spec: ModelSpec, *, device: torch.device, multiply: Multiply = linear) -> None:
        self._spec = spec
        self._linear = multiply
        full = Rope.build(spec.rope, head_dim=spec.head_dim, device=device)
        self._ropes = {LayerKind.FULL: full, LayerKind.SLIDING: full}
        if spec.local_rope is not None:
            local = Rope.build(spec.local_rope, head_dim=spec.head_dim, device=device)
            self._ropes[LayerKind.SLIDING] = local
        self._kinds = spec.layer_kinds or (LayerKind.FULL,) * spec.n_layers
        self._used_kinds = frozenset(self._kinds)

    def forward(self, batch: PackedBatch, weights: DecoderWeights, kv: PagedKV) -> Tensor:
        """Write the tokens' KV and give what the output matrix multiplies, of the rows that the batch asks
        for: fp32 [R, hidden]."""
        spec = self._spec
        rotations = {kind: self._ropes[kind].at(batch.positions) for kind in self._used_kinds}
        residual = weights.embedding.dequantize(batch.token_ids)  # [T, hidden]
        residual = residual * spec.embedding_scale
        normed = kernels.rms_norm(residual, weights.layers[0].attention_norm, spec.norm_eps)
        for index, layer in enumerate(weights.layers):
            mixed = self._attend(index, layer, normed, rotations[self._kinds[index]], batch, kv)
            adapted = batch.adapted
            is_last = index + 1 == spec.n_layers
            if is_last and batch.logit_rows is not None:
                # Past the last KV write only the rows whose logits are asked for matter.
                mixed, residual = mixed[batch.logit_rows], residual[batch.logit_rows]
                adapted = batch.adapted_logits
                if not mixed.shape[0]:
                    return mixed.new_empty((0, spec.hidden_size))
            normed = kernels.residual_norm(
                _add_bias(self._multiply(mixed, layer.o, f"layers.{index}.o", adapted), layer.o_bias),
                residual,
                layer.ffn_norm,
                spec.norm_eps,
                post_weight=layer.post_attention_norm,
            )
            inner = self._multiply(normed, layer.gate_up, f"layers.{index}.gate_up", adapted)
            gated = kernels.gated_activation(inner, spec.activation)
            normed = kernels.residual_norm(
                self._multiply(gated, layer.down, f"layers.{index}.down", adapted),
                residual,
                weights.final_norm if is_last else weights.layers[index + 1].attention_norm,
                spec.norm_eps,
                post_weight=layer.post_ffn_norm,
            )
        return normed

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        normed: Tensor,
        rotation: tuple[Tensor, Tensor],
        batch: PackedBatch,
        kv: PagedKV,
    ) -> Tensor:
        """Attention of one layer before its output projection, [T, n_heads * head_dim]."""
        spec = self._spec
        keys, values = kv.layers[index]
        q = kernels.rope_and_cache(
            self._multiply(normed, layer.qkv, f"layers.{index}.qkv", batch.adapted),
            *rotation,
            batch.slots,
            keys,
            values,
            n_heads=spec.n_heads,
            bias=layer.qkv_bias,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=spec.norm_eps,
        )
        window = spec.sliding_window if self._kinds[index] is LayerKind.SLIDING else None
        mixed = attention(q, keys, values, batch.meta, scale=spec.attention_scale, window=window)
        return mixed.flatten(1)

    def _multiply(self, x: Tensor, matrix: Matrix, part: str, adapted: tuple[AdaptedRows, ...]) -> Tensor:
        y = self._linear(x, matrix)
        for each in adapted:
            each.add_to(y, x, part)
        return y


def _add_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias
