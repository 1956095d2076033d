"""The step policy that an engine has unless it is given another."""

from __future__ import annotations

import math

from paceline_engine.plan import Plan
from paceline_engine.schedule.base import StepDecision, StepState


def urgency(plan: Plan, arrival: int) -> tuple[float, float, int]:
    """Sort key: first token due, then deadline, then arrival. A missing time is the least urgent."""
    return (
        math.inf if plan.first_token_by_s is None else plan.first_token_by_s,
        math.inf if plan.deadline_at_s is None else plan.deadline_at_s,
        arrival,
    )


class EarliestFirst:
    """Decodes first, then prompts in order of urgency, in full chunks; never changes a variant."""

    def decide_step(self, state: StepState) -> StepDecision:
        ordered = sorted(state.prefilling, key=lambda view: urgency(view.plan, view.arrival))
        return StepDecision(
            prefill_order=tuple(view.key for view in ordered), prefill_tokens=state.max_prefill_tokens
        )
