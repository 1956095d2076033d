"""The compiled kernels as Python calls: C functions over pointers, which give the interpreter lock back.

Every method takes contiguous CPU tensors and gives what the function of the same name in ``fallback`` gives.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from paceline_engine.errors import InvalidValueError
from paceline_engine.kernels.fallback import activation_limit
from paceline_engine.kernels.meta import AttentionMeta
from paceline_engine.kernels.weights import Fp8Weight, Int4Weight, Int8Weight
from paceline_engine.model.spec import Activation

_SIZES = [c_int64] * 3
_ARGUMENTS: dict[str, list[type]] = {
    "linear_fp32": [c_void_p] * 3 + _SIZES + [c_int],
    "linear_bf16": [c_void_p] * 3 + _SIZES + [c_int],
    "linear_fp8": [c_void_p] * 4 + _SIZES + [c_int],
    "linear_int8": [c_void_p] * 4 + _SIZES + [c_int, c_int],
    "linear_int4": [c_void_p] * 5 + _SIZES + [c_int],
    "attention": [c_void_p] * 7 + [c_int64] * 8 + [c_float, c_int, c_int],
    "rms_norm": [c_void_p] * 3 + [c_int64] * 2 + [c_float, c_int],
    "residual_norm": [c_void_p] * 5 + [c_int64] * 2 + [c_float, c_int],
    "rope_and_cache": [c_void_p] * 10 + [c_int64] * 5 + [c_float, c_int, c_int],
    "gated_activation": [c_void_p] * 2 + [c_int64] * 2 + [c_int, c_int],
}


class NativeKernels:
    """One instruction set of the library. Threads follow ``torch.set_num_threads``."""

    def __init__(self, library: ctypes.CDLL, instruction_set: str) -> None:
        self.instruction_set = instruction_set
        calls: dict[str, Callable[..., int]] = {}
        for name, arguments in _ARGUMENTS.items():
            call = library[f"pk_{instruction_set}_{name}"]
            call.argtypes, call.restype = arguments, c_int
            calls[name] = call
        self._linear_fp32 = calls["linear_fp32"]
        self._linear_bf16 = calls["linear_bf16"]
        self._linear_fp8 = calls["linear_fp8"]
        self._linear_int8 = calls["linear_int8"]
        self._linear_int4 = calls["linear_int4"]
        self._attention = calls["attention"]
        self._rms_norm = calls["rms_norm"]
        self._residual_norm = calls["residual_norm"]
        self._rope_and_cache = calls["rope_and_cache"]
        self._gated_activation = calls["gated_activation"]

    def linear_fp32(self, x: Tensor, w: Tensor) -> Tensor:
        n, k = w.shape
        out = x.new_empty((x.shape[0], n))
        self._linear_fp32(
            x.data_ptr(), w.data_ptr(), out.data_ptr(), x.shape[0], n, k, torch.get_num_threads()
        )
        return out

    def linear_bf16(self, x: Tensor, w: Tensor) -> Tensor:
        n, k = w.shape
        out = x.new_empty((x.shape[0], n))
        self._linear_bf16(
            x.data_ptr(), w.data_ptr(), out.data_ptr(), x.shape[0], n, k, torch.get_num_threads()
        )
        return out

    def linear_fp8(self, x: Tensor, w: Fp8Weight) -> Tensor:
        n, k = w.shape
        out = x.new_empty((x.shape[0], n))
        self._linear_fp8(
            x.data_ptr(),
            w.codes.data_ptr(),
            w.scale.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            n,
            k,
            torch.get_num_threads(),
        )
        return out

    def linear_int8(self, x: Tensor, w: Int8Weight) -> Tensor:
        n, k = w.shape
        out = x.new_empty((x.shape[0], n))
        self._linear_int8(
            x.data_ptr(),
            w.codes.data_ptr(),
            w.scale.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            n,
            k,
            activation_limit(k),
            torch.get_num_threads(),
        )
        return out

    def linear_int4(self, x: Tensor, w: Int4Weight) -> Tensor:
        n, k = w.shape
        out = x.new_empty((x.shape[0], n))
        self._linear_int4(
            x.data_ptr(),
            w.codes.data_ptr(),
            w.scale.data_ptr(),
            w.minimum.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            n,
            k,
            torch.get_num_threads(),
        )
        return out

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: AttentionMeta,
        *,
        scale: float,
        window: int | None,
    ) -> Tensor:
        n_blocks, block_size, n_kv_heads, head_dim = k_cache.shape
        out = torch.empty_like(q)
        failed = self._attention(
            q.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            meta.query_starts.data_ptr(),
            meta.positions.data_ptr(),
            meta.block_tables.data_ptr(),
            out.data_ptr(),
            meta.positions.shape[0],
            q.shape[1],
            n_kv_heads,
            head_dim,
            n_blocks,
            block_size,
            meta.block_tables.shape[1],
            0 if window is None else window,
            scale,
            k_cache.dtype == torch.bfloat16,
            torch.get_num_threads(),
        )
        if failed:
            raise _outside("block_tables", f"covering each sequence with blocks 0 to {n_blocks - 1}")
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        n = x.shape[-1]
        out = torch.empty_like(x)
        self._rms_norm(
            x.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            x.numel() // max(1, n),
            n,
            eps,
            torch.get_num_threads(),
        )
        return out

    def residual_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, post_weight: Tensor | None
    ) -> Tensor:
        n = x.shape[-1]
        out = torch.empty_like(x)
        self._residual_norm(
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            _pointer(post_weight),
            out.data_ptr(),
            x.numel() // max(1, n),
            n,
            eps,
            torch.get_num_threads(),
        )
        return out

    def rope_and_cache(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        n_heads: int,
        bias: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        n_blocks, block_size, n_kv_heads, head_dim = k_cache.shape
        q = qkv.new_empty((qkv.shape[0], n_heads, head_dim))
        failed = self._rope_and_cache(
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            slots.data_ptr(),
            _pointer(bias),
            _pointer(q_norm),
            _pointer(k_norm),
            q.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            qkv.shape[0],
            n_heads,
            n_kv_heads,
            head_dim,
            n_blocks * block_size,
            eps,
            k_cache.dtype == torch.bfloat16,
            torch.get_num_threads(),
        )
        if failed:
            raise _outside("slots", f"0 to {n_blocks * block_size - 1}")
        return q

    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        n = gate_up.shape[-1] // 2
        out = gate_up.new_empty((gate_up.shape[0], n))
        self._gated_activation(
            gate_up.data_ptr(),
            out.data_ptr(),
            gate_up.shape[0],
            n,
            activation is Activation.GELU_TANH,
            torch.get_num_threads(),
        )
        return out


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _outside(field: str, limit: str) -> InvalidValueError:
    return InvalidValueError(
        field,
        observed="an index outside the KV cache",
        limit=limit,
        remedy="build the metadata from the pass's block tables",
    )
