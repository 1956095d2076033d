"""Predict and decide without running."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from paceline.cli.progress import progress_bar

if TYPE_CHECKING:
    from paceline.calibrate import ProfileOption
    from paceline_policies.decision import Decision
    from paceline_policies.slo import SLO


def decide(
    prompt: str, *, slo: SLO, model: str, max_tokens: int, profile: ProfileOption = "auto"
) -> Decision:
    """The decision for one user message.

    Raises:
        PacelineError: the model cannot be had, or an option makes no sense.
    """
    return asyncio.run(_plan(prompt, slo=slo, model=model, max_tokens=max_tokens, profile=profile))


def show(decision: Decision, *, as_json: bool) -> None:
    """Print it."""
    from paceline.report import decision_table, decision_to_dict

    print(json.dumps(decision_to_dict(decision), indent=2) if as_json else decision_table(decision))


async def _plan(prompt: str, *, slo: SLO, model: str, max_tokens: int, profile: ProfileOption) -> Decision:
    import paceline

    with progress_bar() as on_progress:
        client = await paceline.AsyncClient(
            model, slo=slo, profile=profile, on_progress=on_progress
        ).__aenter__()
    try:
        async with client.turn() as turn:
            return await turn.plan([{"role": "user", "content": prompt}], max_tokens=max_tokens)
    finally:
        await client.aclose()
