"""What a backend reports before a decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline_engine.mode import Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of a backend at one moment, for one prompt."""

    taken_at_s: float
    prompt_tokens: int
    adapter: str | None = None
    """The LoRA adapter that the prompt is for."""
    cached_tokens: Mapping[Variant, int] = field(default_factory=dict[Variant, int])
    """Prompt tokens that the prefix cache would serve, for each variant that may be asked."""
    cached_mixed_tokens: int = 0
    """Prompt tokens that it would serve where blocks of lower variants may be used too."""
    repetition: float | None = None
    """Share of the prompt's tokens that a look-up of the two before them would have drafted right; None where
    the backend does not tell."""
    running: int = 0
    """Sequences that decode now."""
    running_context_tokens: int = 0
    """Sum of their context lengths."""
    running_variant: Variant | None = None
    """The variant that most running sequences use."""
    waiting: int = 0
    """Sequences queued or still in prefill."""
    waiting_prefill_tokens: int = 0
    """Prompt tokens that stand before this prompt."""
    free_blocks: int | None = None
    """Free or evictable KV blocks; None where the backend does not tell."""
    total_blocks: int | None = None
    pinned_blocks: int = 0
    """KV blocks that pins keep from eviction."""
    block_size: int | None = None
    """Tokens per KV block."""
    loading_s: Mapping[Variant, float] = field(default_factory=dict[Variant, float])
    """Expected seconds until a variant could run, of those that have yet to be loaded."""

    @property
    def capacity_tokens(self) -> int | None:
        """What the KV cache holds; None where the backend does not tell."""
        if self.total_blocks is None or self.block_size is None:
            return None
        return self.total_blocks * self.block_size
