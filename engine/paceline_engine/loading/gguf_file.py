"""A GGUF file as a Checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paceline_engine.errors import MissingExtraError, ModelLoadError, UnsupportedModelError
from paceline_engine.loading.digest import DigestPart, files_digest
from paceline_engine.loading.gguf_header import (
    FETCH_AGAIN,
    TENSOR_TYPES,
    GgufHeader,
    TensorEntry,
    read_header,
)
from paceline_engine.loading.gguf_spec import spec_from_gguf
from paceline_engine.loading.layout import check_tensors
from paceline_engine.model.spec import ModelSpec

if TYPE_CHECKING:
    import torch

BLOCKS_PER_CHUNK = 8192
"""Blocks widened at once: enough to keep numpy busy, little beside the tensor."""

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PLAIN_NORMS = {"ffn_norm": "post_attention_layernorm"}
_SANDWICH_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,3})\.([a-z_]+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"


class GgufCheckpoint:
    """A GGUF file, opened and checked; its tensors are read one at a time.

    Raises:
        ModelLoadError: the file is damaged or does not fit its own table.
        UnsupportedModelError: an architecture, tensor or tensor type that is not supported.
    """

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        self._name = name or path.stem
        self._path = path
        self._digest: str | None = None
        self._header = read_header(path)
        self._spec = spec_from_gguf(self._header, self._frequency_factors())
        self._entries = _renamed(self._header, self._spec)
        check_tensors(str(path), self._spec, {name: entry.shape for name, entry in self._entries.items()})

    @property
    def name(self) -> str:
        return self._name

    @property
    def path(self) -> Path:
        return self._path

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def digest(self) -> str:
        """See ``paceline_engine.loading.digest`` for what it covers."""
        if self._digest is None:
            starts = tuple(entry.start for entry in self._header.tensors.values())
            part = DigestPart(path=self._path, head_bytes=self._header.n_bytes, tensor_starts=starts)
            self._digest = files_digest([part])
        return self._digest

    def tensor_names(self) -> Iterable[str]:
        return tuple(self._entries)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor: fp32, or bf16/fp16 where the file holds that; [out, in] for matrices."""
        import torch

        entry = self._entries.get(name)
        if entry is None:
            raise ModelLoadError(
                str(self._path),
                tensor=name,
                reason="is not in the file",
                remedy="ask for one of tensor_names()",
            )
        if entry.type_name == "BF16":
            raw = self._read(entry).view(np.int16).reshape(entry.shape)
            tensor = torch.from_numpy(raw.copy()).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(self._values(entry))
        if self._header.metadata["general.architecture"] == "llama":
            tensor = _unpermuted(name, tensor, self._spec)
        return tensor

    def _read(self, entry: TensorEntry) -> npt.NDArray[np.uint8]:
        try:
            raw = np.fromfile(self._path, np.uint8, count=entry.n_bytes, offset=entry.start)
        except OSError as error:
            raise ModelLoadError(
                str(self._path), tensor=entry.name, reason=f"cannot be read ({error})", remedy=FETCH_AGAIN
            ) from error
        if raw.size != entry.n_bytes:
            raise ModelLoadError(
                str(self._path),
                tensor=entry.name,
                reason=f"only {raw.size} of {entry.n_bytes} bytes are left: the file changed on disk",
                remedy=FETCH_AGAIN,
            )
        return raw

    def _values(self, entry: TensorEntry) -> npt.NDArray[Any]:
        raw = self._read(entry)
        if entry.type_name in ("F32", "F16"):
            kind = np.float32 if entry.type_name == "F32" else np.float16
            return raw.view(kind).reshape(entry.shape)
        return widen(raw, entry.type_name).reshape(entry.shape)

    def _frequency_factors(self) -> tuple[float, ...] | None:
        entry = self._header.tensors.get(_ROPE_FACTORS)
        if entry is None:
            return None
        if entry.type_name != "F32" or len(entry.shape) != 1 or entry.shape[0] > 65_536:
            raise UnsupportedModelError(
                str(self._path),
                tensor=_ROPE_FACTORS,
                reason=f"is {entry.type_name} {list(entry.shape)} and no F32 vector",
                remedy="convert the model again",
            )
        return tuple(float(value) for value in self._values(entry))


def widen(raw: npt.NDArray[np.uint8], type_name: str) -> npt.NDArray[np.float32]:
    """Quantized blocks to fp32, flat, a chunk at a time."""
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as error:
        raise MissingExtraError("engine", needed_for="reading a GGUF file") from error

    kind = GGMLQuantizationType[type_name]
    per_block, block_bytes = next(
        (values, width) for known, values, width in TENSOR_TYPES.values() if known == type_name
    )
    n_blocks = raw.size // block_bytes
    blocks = raw.reshape(n_blocks, block_bytes)
    values = np.empty(n_blocks * per_block, np.float32)
    with np.errstate(all="ignore"):
        for start in range(0, n_blocks, BLOCKS_PER_CHUNK):
            chunk = blocks[start : start + BLOCKS_PER_CHUNK]
            place = slice(start * per_block, (start + len(chunk)) * per_block)
            values[place] = dequantize(chunk.reshape(1, -1), kind).reshape(-1)
    return values


def _renamed(header: GgufHeader, spec: ModelSpec) -> Mapping[str, TensorEntry]:
    """The table under the names of safetensors checkpoints; names that are not known stay as they are."""
    layer_names = _LAYER_NAMES | (_SANDWICH_NORMS if spec.sandwich_norms else _PLAIN_NORMS)
    renamed: dict[str, TensorEntry] = {}
    for name, entry in header.tensors.items():
        if name == _ROPE_FACTORS:
            continue
        match = _LAYER.fullmatch(name)
        if match and match[2] in layer_names:
            renamed[f"model.layers.{match[1]}.{layer_names[match[2]]}.{match[3]}"] = entry
        else:
            renamed[_TOP_NAMES.get(name, name)] = entry
    return renamed


def _unpermuted(name: str, tensor: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    """Undo the converter's order of q/k rows for llama: neighbouring pairs back to halves."""
    if ".q_proj." in name:
        heads = spec.n_heads
    elif ".k_proj." in name:
        heads = spec.n_kv_heads
    else:
        return tensor
    # [heads, head_dim / 2, 2, ...] -> [heads, 2, head_dim / 2, ...]
    pairs = tensor.reshape(heads, spec.head_dim // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape).contiguous()
