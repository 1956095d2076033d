"""Brief probes of the ways to draft that a backend offers, after its calibration."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib.resources import files

from paceline.measured import run_measured
from paceline.policy import Served
from paceline_engine.request import Message
from paceline_engine.snapshot import Snapshot
from paceline_engine.timeline import Timeline
from paceline_policies.draft_calibration import DraftProbe, draft_probes, with_drafts
from paceline_policies.profile import Profile


async def calibrate_drafts(served: Served, profile: Profile, *, on_share: Callable[[float], None]) -> Profile:
    """The profile with what drafting costs and how much of it is accepted.

    The conversations reach from an answer in the model's own words to one of a row of like answers. Nothing
    runs where the backend offers no way to draft. ``on_share`` is told the share that is done.
    """
    runs: list[tuple[DraftProbe, Snapshot, Timeline]] = []
    if probes := draft_probes(served.info):
        conversations = _conversations()
        for done, messages in enumerate(conversations):
            on_share(done / len(conversations))
            runs += [run for probe in probes if (run := await _run(served, probe, messages)) is not None]
    return with_drafts(profile, runs) if runs else profile


def _conversations() -> list[Sequence[Message]]:
    text = files("paceline").joinpath("data/draft_conversations.jsonl").read_text(encoding="utf-8")
    return [json.loads(line)["messages"] for line in text.splitlines()]


async def _run(
    served: Served, probe: DraftProbe, messages: Sequence[Message]
) -> tuple[DraftProbe, Snapshot, Timeline] | None:
    prompt = await served.backend.prepare(messages)
    if prompt.n_tokens + probe.max_tokens > served.info.context_tokens:
        return None
    snapshot = await served.backend.snapshot(prompt)
    run = await run_measured(served.backend, prompt, probe.mode, max_tokens=probe.max_tokens)
    return probe, snapshot, run.timeline
