"""Predict and decide without running."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from paceline.cli.progress import progress_bar

if TYPE_CHECKING:
    from paceline_policies.decision import Decision
    from paceline_policies.slo import SLO


def run(prompt: str, *, slo: SLO, model: str, max_tokens: int, as_json: bool) -> None:
    """Print the decision for one user message."""
    from paceline.report import decision_table, decision_to_dict

    decision = asyncio.run(_plan(prompt, slo=slo, model=model, max_tokens=max_tokens))
    print(json.dumps(decision_to_dict(decision), indent=2) if as_json else decision_table(decision))


async def _plan(prompt: str, *, slo: SLO, model: str, max_tokens: int) -> Decision:
    import paceline

    with progress_bar() as on_progress:
        client = await paceline.AsyncClient(model, slo=slo, on_progress=on_progress).__aenter__()
    try:
        async with client.turn() as turn:
            return await turn.plan([{"role": "user", "content": prompt}], max_tokens=max_tokens)
    finally:
        await client.aclose()
