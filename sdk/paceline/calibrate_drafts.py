"""Brief probes of the ways to draft that a backend offers, after its calibration."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.measured import run_measured
from paceline.policy import Served
from paceline_engine.request import Message
from paceline_engine.timeline import Timeline
from paceline_policies.draft_calibration import DraftProbe, draft_probes, with_drafts
from paceline_policies.profile import Profile

_CONVERSATIONS: tuple[Sequence[Message], ...] = (
    (
        {
            "role": "user",
            "content": 'The booking tool returned: {"flight": "SK4012", "from": "Oslo", "to": '
            '"Bergen", "departs": "09:40", "gate": "B12", "status": "on time"}. '
            "Tell the traveller when and where the flight departs.",
        },
    ),
    ({"role": "user", "content": "Explain in a few sentences why the sky looks blue at noon."},),
)
"""An answer that quotes a tool's output, and one in the model's own words."""


async def calibrate_drafts(served: Served, profile: Profile) -> Profile:
    """The profile with what drafting costs and how much of it is accepted.

    Nothing runs where the backend offers no way to draft.
    """
    probes = [(probe, messages) for probe in draft_probes(served.info) for messages in _CONVERSATIONS]
    lines = [(probe, await _run(served, probe, messages)) for probe, messages in probes]
    return with_drafts(profile, [(probe, line) for probe, line in lines if line is not None])


async def _run(served: Served, probe: DraftProbe, messages: Sequence[Message]) -> Timeline | None:
    prompt = await served.backend.prepare(messages)
    if prompt.n_tokens + probe.max_tokens > served.info.context_tokens:
        return None
    run = await run_measured(served.backend, prompt, probe.mode, max_tokens=probe.max_tokens)
    return run.timeline
