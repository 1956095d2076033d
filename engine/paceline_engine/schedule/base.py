"""What a step policy sees and decides. No torch here: policies of other packages implement it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from paceline_engine.mode import Variant
from paceline_engine.plan import Plan
from paceline_engine.timeline import StepTime


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceKey:
    """Names one sequence: a choice of a generation, or a branch of a scoring."""

    request_id: str
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceView:
    """One sequence as it stands before the step."""

    key: SequenceKey
    plan: Plan
    variant: Variant
    """The variant it would run with now."""
    submitted_at_s: float
    arrival: int
    """Rises with each submission; the last word in any order."""
    computed_tokens: int
    """Tokens whose KV stands in its blocks."""
    remaining_tokens: int
    """Tokens still to be run before its next token can be drawn; 1 while it decodes."""
    output_tokens: int
    first_token_at_s: float | None = None
    last_token_at_s: float | None = None
    variant_changes: int = 0
    """How often it was moved to another variant."""
    variant_since_tokens: int = 0
    """Its output tokens when it was last moved."""
    variant_held: bool = False
    """Its caller chose the variant that it runs with: a policy leaves it there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepState:
    """What a step policy decides from. Times are monotonic seconds."""

    now_s: float
    decoding: tuple[SequenceView, ...]
    """Sequences that need one more token each; all of them run, as far as their batch caps allow."""
    prefilling: tuple[SequenceView, ...]
    """Sequences with prompt tokens to run: queued, part-way, or to be computed again."""
    free_blocks: int
    block_size: int
    max_prefill_tokens: int
    """Upper bound of ``StepDecision.prefill_tokens``."""
    previous: tuple[StepTime, ...] = ()
    """The passes of the step before: what was run, and how long it took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDecision:
    """What the step is to do."""

    prefill_order: tuple[SequenceKey, ...]
    """Most urgent first. Sequences left out do not prefill in this step."""
    prefill_tokens: int
    """Prompt tokens to run beside the decodes; at least 1 is run where nothing decodes."""
    variants: Mapping[SequenceKey, Variant] = field(default_factory=dict[SequenceKey, Variant])
    """Streams to move to another variant from this step on."""
    reasons: Mapping[SequenceKey, str] = field(default_factory=dict[SequenceKey, str])
    """Why each of ``variants`` is moved; for people, in the timeline."""


class StepPolicy(Protocol):
    """Decides each step's work. Called with the engine's lock held: it must be quick and never block."""

    def decide_step(self, state: StepState) -> StepDecision: ...


class Weights(Protocol):
    """Which variants are in memory, as the scheduler asks."""

    def ready(self, variant: Variant) -> bool:
        """Whether a pass of it may run now."""
        ...

    def want(self, variant: Variant, *, urgent: bool = True) -> None:
        """Have it loaded beside the steps, unless it is there."""
        ...
