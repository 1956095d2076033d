"""A model of random weights in the sizes of Gemma 3 270M, for machines that no checkpoint can be brought to.

The output matrix is the embedding table with its rows moved: so the likeliest next token stands far above
the others, as after training, and rounding seldom changes which one it is.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from paceline_engine.model.spec import Activation, LayerKind, ModelSpec, RopeSpec

_KINDS = tuple(LayerKind.FULL if layer % 6 == 5 else LayerKind.SLIDING for layer in range(18))
GEMMA_SIZED = ModelSpec(
    family="gemma3",
    n_layers=18,
    hidden_size=640,
    n_heads=4,
    n_kv_heads=1,
    head_dim=256,
    intermediate_size=2048,
    vocab_size=1 << 17,
    context_tokens=32_768,
    norm_eps=1e-6,
    activation=Activation.GELU_TANH,
    rope=RopeSpec(theta=1e6),
    local_rope=RopeSpec(theta=1e4),
    layer_kinds=_KINDS,
    sliding_window=512,
    qk_norm=True,
    sandwich_norms=True,
    attention_scale=256**-0.5,
    embedding_scale=640**0.5,
    eos_token_ids=(1,),
)
SMALL = replace(
    GEMMA_SIZED,
    n_layers=6,
    layer_kinds=_KINDS[:6],
    hidden_size=64,
    head_dim=32,
    intermediate_size=96,
    vocab_size=384,
    context_tokens=1024,
    sliding_window=16,
    attention_scale=32**-0.5,
    embedding_scale=8.0,
)
"""The same in little, for tests of what uses it."""
_SHARE = 0.35
"""Of each sublayer in the residual stream."""


@dataclass(frozen=True, kw_only=True)
class StandIn:
    """A ``Checkpoint``: the same weights whenever they are asked for."""

    spec: ModelSpec = GEMMA_SIZED
    name: str = "random weights in the sizes of Gemma 3 270M"
    path: Path = Path(__file__)

    @property
    def digest(self) -> str:
        return f"{zlib.crc32(repr(self.spec).encode()):064x}"

    def tensor_names(self) -> Iterable[str]:
        return ()

    def tensor(self, name: str) -> Tensor:
        spec = self.spec
        q_size, kv_size = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
        hidden, inner = spec.hidden_size, spec.intermediate_size
        if name == "lm_head.weight":
            return self.tensor("model.embed_tokens.weight").roll(1, 0)
        kind = name.removesuffix(".weight").rpartition(".")[2]
        if kind.endswith("norm"):
            size = spec.head_dim if kind in ("q_norm", "k_norm") else hidden
            share = _SHARE if kind.startswith("post") else 1.0
            return share * (1 + 0.1 * self._random(name, (size,)))
        shapes = {
            "embed_tokens": (spec.vocab_size, hidden),
            "q_proj": (q_size, hidden),
            "k_proj": (kv_size, hidden),
            "v_proj": (kv_size, hidden),
            "o_proj": (hidden, q_size),
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
        }
        values = self._random(name, shapes[kind])
        return (values * shapes[kind][1] ** -0.5).bfloat16()

    def _random(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


class StandInTokenizer:
    """A token for each byte of a text; any other token reads as its number."""

    bos_token_id = None
    has_chat_template = False

    def __init__(self, spec: ModelSpec) -> None:
        self.vocab_size = spec.vocab_size
        self.eos_token_ids = spec.eos_token_ids

    def encode(self, text: str, *, add_bos: bool = False) -> tuple[int, ...]:
        return tuple(2 + byte for byte in text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode()

    def token_bytes(self, token_id: int) -> bytes:
        return f" {token_id}".encode()

    def render_chat(self, messages: object, *, tools: object = None) -> tuple[int, ...]:
        raise NotImplementedError
