"""What loading gives to the rest of the engine: one checkpoint, whatever its file format.

Tensor names are those of the safetensors checkpoints (``model.layers.0.self_attn.q_proj.weight``),
``lm_head.weight`` absent where embeddings are tied. Values are as the decoder multiplies them: norm
weights hold the full factor (a Gemma checkpoint's ``1 + w`` is already added), and q/k rows stand in the
half-split RoPE order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from paceline_engine.model.spec import ModelSpec

if TYPE_CHECKING:
    import torch


LONG_TEXT_CHARACTERS = 16_384
"""From here on encoding a text takes longer than an event loop should wait (some 5 ms)."""


class Checkpoint(Protocol):
    """An opened model; its tensors are read one at a time."""

    @property
    def name(self) -> str:
        """For people: ``gemma3-270m``, a hub id, or the file's stem."""
        ...

    @property
    def path(self) -> Path: ...

    @property
    def digest(self) -> str:
        """Hex digest that changes when the weights, tokenizer or spec change."""
        ...

    @property
    def spec(self) -> ModelSpec: ...

    def tensor_names(self) -> Iterable[str]: ...

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor, widened to fp32 or in the checkpoint's own bf16/fp16; shape [out, in] for matrices.

        Raises:
            ModelLoadError: it is absent or does not fit the file.
        """
        ...


class Tokenizer(Protocol):
    """Text to ids and back. Importing and using it needs no torch."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str, *, add_bos: bool = False) -> tuple[int, ...]:
        """User text to ids. Text that spells a control token is encoded as plain text."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Ids to text, control tokens left out; invalid UTF-8 becomes U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for, as incremental detokenizing needs them."""
        ...

    def render_chat(
        self, messages: Iterable[object], *, tools: Iterable[object] | None = None
    ) -> tuple[int, ...]:
        """The conversation's ids, ready for the answer, with exactly one BOS where the model has one.

        Control ids come from the template alone, never from what a message spells.

        Raises:
            InvalidValueError: no messages, an unknown role, or a conversation the template refuses.
        """
        ...


Resolver = Callable[[str], Path]
"""A model's name, path or hub id to the file or folder that holds it."""
