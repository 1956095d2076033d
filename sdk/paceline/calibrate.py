"""Calibration: a short series of probes on a backend, and what precision costs in quality.

It runs once for each machine, model and whatever else the speed depends on (the format of the weights, the
kernels' build and instruction set, PyTorch, the threads), when a client first starts; later starts read the
saved profile.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Literal

from paceline import profiles
from paceline.calibrate_drafts import calibrate_drafts
from paceline.calibrate_quality import held_texts, measure_quality
from paceline.measured import run_measured
from paceline.policy import Served
from paceline_engine.backends.base import OnProgress, Progress
from paceline_engine.mode import Mode
from paceline_engine.request import Prompt
from paceline_engine.timeline import Timeline
from paceline_policies.calibration import Probe, assumed_profile, fit_profile, probes
from paceline_policies.profile import Profile

_logger = logging.getLogger("paceline")

ProfileOption = Literal["auto", "calibrate", "quick", "assume"]
"""``auto``: the saved profile, else calibrate and save. ``calibrate``: anew, and save. ``quick``: as
``auto`` with fewer probes. ``assume``: none; start from a guess and learn from traffic."""

WAIT_FOR_OTHER_S = 180.0
PROBES_SHARE, QUALITY_SHARE, DRAFTS_SHARE = 0.5, 0.2, 0.3
"""Of the progress that is reported: about how the time divides."""


def version() -> str:
    """Of this package; profiles of another version are not read."""
    try:
        return installed_version("paceline")
    except PackageNotFoundError:
        return "0"


async def profile_of(
    served: Served, option: ProfileOption | Profile, *, on_progress: OnProgress
) -> tuple[Profile, bool]:
    """The profile of a backend, and whether what is learned later is to be saved."""
    if isinstance(option, Profile):
        return option, False
    known = getattr(served.backend, "profile", None)
    if isinstance(known, Profile):
        return known, False
    if option == "assume" or not await _takes_ids(served):
        return assumed_profile(served.info, version=version()), False
    path = profiles.profile_path(served.info, version=version())
    saved = profiles.load(path, served.info, version=version())
    if saved is not None and option != "calibrate":
        return saved, True
    if (
        option != "calibrate"
        and (why := profiles.why_stale(path, served.info, version=version())) is not None
    ):
        _logger.warning("measuring %s on this machine anew: %s", served.info.name, why)
    quick = option == "quick"
    give_up_at_s = time.monotonic() + WAIT_FOR_OTHER_S
    while True:
        with profiles.claim(path) as mine:
            if mine or time.monotonic() >= give_up_at_s:
                profile = await calibrate(served, quick=quick, on_progress=on_progress)
                profiles.save(path, profile)
                return profile, True
        on_progress(Progress(stage="calibrate", done=0.0, message="another process is calibrating"))
        await asyncio.sleep(0.2)
        if (saved := profiles.load(path, served.info, version=version())) is not None:
            return saved, True


async def calibrate(served: Served, *, quick: bool = False, on_progress: OnProgress) -> Profile:
    """Run the probes and measure the quality of each variant. Saves nothing."""
    todo = probes(served.info, quick=quick)
    runs: list[tuple[Probe, Timeline]] = []
    # Ordinary random ids: what a token is does not change what it costs, and no prefix repeats.
    ids = random.Random(0)
    for done, probe in enumerate(todo):
        on_progress(
            Progress(
                stage="calibrate",
                done=PROBES_SHARE * done / len(todo),
                message=f"{probe.variant}, {probe.prompt_tokens} prompt tokens",
            )
        )
        lines = await asyncio.gather(
            *(_run_probe(served, probe, _random_prompt(served, probe, ids)) for _ in range(probe.concurrency))
        )
        runs.extend((probe, line) for line in lines)

    def part(before: float, whole: float, message: str) -> Callable[[float], None]:
        def on_share(share: float) -> None:
            on_progress(Progress(stage="calibrate", done=before + whole * share, message=message))

        return on_share

    on_quality = part(PROBES_SHARE, QUALITY_SHARE, "measuring quality")
    on_drafts = part(PROBES_SHARE + QUALITY_SHARE, DRAFTS_SHARE, "measuring drafts")
    qualities = await measure_quality(served, await held_texts(served, quick=quick), on_share=on_quality)
    profile = fit_profile(served.info, runs, version=version(), qualities=qualities)
    profile = await calibrate_drafts(served, profile, on_share=on_drafts)
    on_progress(Progress(stage="calibrate", done=1.0))
    return profile


async def _takes_ids(served: Served) -> bool:
    """Whether the backend runs the token ids that it is given, so that probes can be sized."""
    prompt = await served.backend.prepare([{"role": "user", "content": "hello"}])
    return bool(prompt.token_ids)


async def _run_probe(served: Served, probe: Probe, prompt: Prompt) -> Timeline:
    mode = Mode(variant=probe.variant, prefix_cache=False)
    return (await run_measured(served.backend, prompt, mode, max_tokens=probe.max_tokens)).timeline


def _random_prompt(served: Served, probe: Probe, ids: random.Random) -> Prompt:
    token_ids = tuple(ids.randrange(served.info.vocab_size) for _ in range(probe.prompt_tokens))
    return Prompt(messages=(), token_ids=token_ids, n_tokens=len(token_ids))
