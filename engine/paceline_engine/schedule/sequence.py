"""One sequence as the scheduler knows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_engine.cache.prefix import CacheScope, PrefixNode
from paceline_engine.mode import Variant
from paceline_engine.plan import Plan
from paceline_engine.schedule.base import SequenceKey, SequenceView
from paceline_engine.timeline import StepTime, TimelineEvent

if TYPE_CHECKING:
    from paceline_engine.model.adapter import Adapter


class SequenceState:
    """A row of tokens that grows, the blocks that hold its KV, and how far that has been computed."""

    def __init__(
        self,
        key: SequenceKey,
        token_ids: list[int],
        *,
        n_prompt: int,
        plan: Plan,
        arrival: int,
        submitted_at_s: float,
        scope: CacheScope | None,
        adapter: Adapter | None = None,
        scored: bool = False,
        weight: int = 1,
    ) -> None:
        self.key = key
        self.token_ids = token_ids
        """Prompt, then output (or, for scoring, the option)."""
        self.n_prompt = n_prompt
        self.plan = plan
        self.arrival = arrival
        self.submitted_at_s = submitted_at_s
        self.scope = scope
        """None where the mode leaves the prefix cache out."""
        self.adapter = adapter
        self.scored = scored
        """Its tokens are given, not drawn: it never decodes, and ends when all are computed."""
        self.weight = weight
        """Sequences that it will have become when its prompt is done."""
        self.variant = plan.mode.variant
        self.variant_changes = 0
        self.variant_since_tokens = 0
        """Output tokens when ``variant`` was last changed."""
        self.variant_held = False
        """The caller chose ``variant``: the step policy leaves it."""

        self.blocks: list[int] = []
        self.n_computed = 0
        """Tokens whose KV stands in ``blocks``."""
        self.n_published = 0
        """Leading blocks that the prefix cache knows."""
        self.node: PrefixNode | None = None
        """Of the last published block."""
        self.kv_quality: Variant | None = None
        """The lowest quality in ``blocks``: later KV is computed from earlier KV."""

        self.removed = False
        self.last_step = -1
        self.queued_at_s: float | None = None
        """When its grammar was compiled; None where nothing had to be waited for."""
        self.started_at_s: float | None = None
        self.first_token_at_s: float | None = None
        self.last_token_at_s: float | None = None
        self.cached_tokens: int | None = None
        """Prompt tokens served by the prefix cache when it first started; None before."""
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.steps: list[StepTime] = []
        self.events: list[TimelineEvent] = []

    @property
    def unit(self) -> SequenceKey:
        """What counts as one against batch caps: the branches of a scoring run as one prefill."""
        return SequenceKey(request_id=self.key.request_id, index=0) if self.scored else self.key

    @property
    def n_remaining(self) -> int:
        return len(self.token_ids) - self.n_computed

    @property
    def n_output(self) -> int:
        return len(self.token_ids) - self.n_prompt

    @property
    def reusable_ids(self) -> list[int]:
        """The tokens, but for the last of them, whose KV may come from the prefix cache.

        Of a scored option none may: the logits of each of its tokens are wanted.
        """
        return self.token_ids[: self.n_prompt + 1] if self.scored else self.token_ids

    @property
    def decoding(self) -> bool:
        """Needs one more token's KV, and then draws the next."""
        return not self.scored and bool(self.blocks) and self.n_output > 0 and self.n_remaining == 1

    def fork(self, index: int, extra_ids: list[int]) -> SequenceState:
        """A sequence that goes on from this one's computed tokens; it has no blocks yet."""
        child = SequenceState(
            SequenceKey(request_id=self.key.request_id, index=index),
            self.token_ids[: self.n_prompt] + extra_ids,
            n_prompt=self.n_prompt,
            plan=self.plan,
            arrival=self.arrival,
            submitted_at_s=self.submitted_at_s,
            scope=self.scope,
            adapter=self.adapter,
            scored=self.scored,
        )
        child.variant = self.variant
        child.variant_changes = self.variant_changes
        child.variant_since_tokens = self.variant_since_tokens
        child.variant_held = self.variant_held
        child.queued_at_s = self.queued_at_s
        child.started_at_s = self.started_at_s
        child.cached_tokens = self.cached_tokens
        child.last_step = self.last_step
        child.steps = list(self.steps)
        child.events = list(self.events)
        return child

    def record_step(self, step: StepTime, *, most: int) -> None:
        """Keep ``step``; of a long run the first half and the latest half of ``most`` stay."""
        self.steps.append(step)
        if len(self.steps) > most:
            del self.steps[most // 2]

    def view(self) -> SequenceView:
        return SequenceView(
            key=self.key,
            plan=self.plan,
            variant=self.variant,
            submitted_at_s=self.submitted_at_s,
            arrival=self.arrival,
            computed_tokens=self.n_computed,
            remaining_tokens=self.n_remaining,
            output_tokens=0 if self.scored else self.n_output,
            first_token_at_s=self.first_token_at_s,
            last_token_at_s=self.last_token_at_s,
            variant_changes=self.variant_changes,
            variant_since_tokens=self.variant_since_tokens,
            variant_held=self.variant_held,
        )
