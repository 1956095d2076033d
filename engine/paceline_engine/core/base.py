"""What goes into and comes out of the step loop. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from paceline_engine.chunk import Chunk, ScoreResult
from paceline_engine.errors import InvalidValueError, PacelineError
from paceline_engine.fidelity import Fidelity
from paceline_engine.mode import Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits of the step loop."""

    max_prefill_tokens_per_step: int = 256
    """Most prompt tokens run in one step: the chunk of chunked prefill."""
    max_sequences: int = 16
    """Most sequences that hold KV blocks and run at once."""
    max_steps_recorded: int = 512
    """Steps kept in one timeline: the first half and the latest half of a longer run."""
    adapt_drafts: bool = True
    """Draft as many tokens as pay, by measured acceptance and cost; else as many as a plan allows."""
    max_pinned_share: float = 0.5
    """Share of the KV blocks that pins may keep from eviction."""
    model_fingerprint: str = ""
    """Part of every prefix cache key."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_pinned_share <= 1:
            raise InvalidValueError(
                "max_pinned_share",
                observed=self.max_pinned_share,
                limit="between 0 and 1",
                remedy="leave it out for the default, or use 0 for no pins",
            )
        for item in fields(self):
            value = getattr(self, item.name)
            least = 2 if item.name == "max_steps_recorded" else 1
            if isinstance(value, int) and not isinstance(value, bool) and value < least:
                raise InvalidValueError(
                    item.name,
                    observed=value,
                    limit=f"at least {least}",
                    remedy="leave it out for the default",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What one step brought forth."""

    chunks: tuple[tuple[str, Chunk], ...] = ()
    """(request id, chunk), in the order in which they were made."""
    scores: tuple[tuple[str, ScoreResult], ...] = ()
    """(request id, result) of the scorings that ended."""
    fidelities: tuple[tuple[str, Mapping[Variant, Fidelity]], ...] = ()
    """(request id, what each variant came to) of the comparisons that ended."""
    errors: tuple[tuple[str, PacelineError], ...] = ()
    """(request id, error): the request ended with it, the others go on."""
