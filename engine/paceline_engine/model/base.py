"""The contract between the step loop and what runs the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from paceline_engine.mode import Variant
from paceline_engine.model.spec import ModelSpec

if TYPE_CHECKING:
    import torch

    from paceline_engine.model.adapter import Adapter


class Logits(StrEnum):
    """Which of a slice's tokens need logits."""

    NONE = "none"
    LAST = "last"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSlice:
    """One sequence's part of a pass: new tokens, where they stand, and where their KV goes."""

    token_ids: Sequence[int]
    position: int
    """Of the first of ``token_ids``; the KV of all positions before it is already in the blocks."""
    block_table: Sequence[int]
    """KV block of each ``block_size`` positions; covers ``position + len(token_ids)``."""
    logits: Logits = Logits.LAST
    adapter: Adapter | None = None
    """What is added to the weights for these tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Vocabulary:
    """Token ids whose logits are wanted."""

    common_ids: tuple[int, ...]
    """The same object pass after pass, so that a runner may keep their part of the output matrix."""
    extra_ids: tuple[int, ...] = ()
    """None of them common."""


class ModelRunner(Protocol):
    """Runs the decoder over a paged KV cache that all variants share."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def n_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def variants(self) -> tuple[Variant, ...]: ...

    def forward(
        self, slices: Sequence[SequenceSlice], variant: Variant, *, vocabulary: Vocabulary | None = None
    ) -> torch.Tensor:
        """One pass over all slices; writes their KV.

        Args:
            vocabulary: the tokens whose logits are wanted, all where it is None: a draft needs only likely
                ones, and the output matrix is a large part of a small model.

        Returns:
            fp32 logits, [rows, vocab_size]: the rows that the slices asked for, in their order. Tokens
            outside of ``vocabulary`` may have minus infinity.
        """
        ...

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block's KV in all layers (copy on write)."""
        ...

    def read_adapter(self, path: str) -> Adapter:
        """Read a LoRA adapter for this model, in any thread, while passes run.

        Raises:
            ModelError: it cannot be found or read, or is for another model.
        """
        ...


@runtime_checkable
class LateLoading(Protocol):
    """What a runner may offer beside ``ModelRunner``: weights that come into memory while others run."""

    @property
    def loaded(self) -> tuple[Variant, ...]:
        """The variants whose weights are in memory."""
        ...

    def load_variant(self, variant: Variant) -> None:
        """Bring a variant's weights into memory. May be called beside ``forward`` of the others."""
        ...

    def bytes_per_variant(self) -> Mapping[Variant, int]:
        """Bytes of weights that a decode step of one token reads, loaded or not."""
        ...
