"""Calibration: a short series of probes on a backend, and what precision costs in quality.

It runs once for each machine, model and version of Paceline, when a client first starts; later starts
read the saved profile.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from importlib.resources import files
from typing import Literal
from uuid import uuid4

from paceline import profiles
from paceline.calibrate_drafts import calibrate_drafts
from paceline.measured import STALL_LIMIT_S, run_measured
from paceline.policy import Served
from paceline_engine.backends.base import OnProgress, Progress
from paceline_engine.mode import Mode, Variant
from paceline_engine.plan import Plan
from paceline_engine.request import Prompt, ScoreRequest
from paceline_engine.timeline import Timeline
from paceline_policies.calibration import Probe, assumed_profile, fit_profile, probes
from paceline_policies.profile import Profile
from paceline_policies.quality import Quality, quality

ProfileOption = Literal["auto", "calibrate", "quick", "assume"]
"""``auto``: the saved profile, else calibrate and save. ``calibrate``: anew, and save. ``quick``: as
``auto`` with fewer probes. ``assume``: none; start from a guess and learn from traffic."""

WAIT_FOR_OTHER_S = 180.0
QUALITY_SHARE = 0.25
"""Of the progress that is reported."""
MAX_QUALITY_WINDOWS = 8
QUALITY_CHARACTERS = 640
"""Of each window, some 160 tokens."""
QUALITY_SCORED = 0.4
"""Of each window; what comes before is its context."""


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
                done=(1 - QUALITY_SHARE) * done / len(todo),
                message=f"{probe.variant}, {probe.prompt_tokens} prompt tokens",
            )
        )
        lines = await asyncio.gather(
            *(_run_probe(served, probe, _random_prompt(served, probe, ids)) for _ in range(probe.concurrency))
        )
        runs.extend((probe, line) for line in lines)
    qualities = await measure_quality(served, quick=quick, on_progress=on_progress)
    profile = fit_profile(served.info, runs, version=version(), qualities=qualities)
    profile = await calibrate_drafts(served, profile)
    on_progress(Progress(stage="calibrate", done=1.0))
    return profile


async def measure_quality(
    served: Served, *, quick: bool = False, on_progress: OnProgress
) -> dict[Variant, Quality]:
    """Perplexity of each variant against the reference (the first), on agent dialogue that ships here."""
    variants: list[Variant] = [each for each in served.info.variants if each != Variant.FP32]
    variants = variants or list(served.info.variants)
    windows = _quality_windows(served.info.context_tokens)[: 2 if quick else MAX_QUALITY_WINDOWS]
    scores: dict[Variant, list[float]] = {variant: [] for variant in variants}
    tokens: list[int] = []
    for done, (head, tail) in enumerate(windows):
        prompt = await served.backend.prepare([{"role": "user", "content": head}])
        counts: list[int] = []
        for variant in variants:
            result = await served.backend.score(
                ScoreRequest(id=uuid4().hex, prompt=prompt, options=(tail,)),
                Plan(
                    mode=Mode(variant=variant, prefix_cache=False), max_tokens=1, stall_limit_s=STALL_LIMIT_S
                ),
            )
            scores[variant].append(result.scores[0].logprob)
            counts.append(result.scores[0].n_tokens)
        tokens.append(max(1, counts[0]))
        on_progress(
            Progress(
                stage="calibrate",
                done=1 - QUALITY_SHARE * (1 - (done + 1) / len(windows)),
                message="measuring quality",
            )
        )
    reference = scores[variants[0]]
    return {
        variant: quality(reference=reference, variant=found, tokens=tokens)
        for variant, found in scores.items()
    }


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


def _quality_windows(context_tokens: int) -> Sequence[tuple[str, str]]:
    """(context, continuation) of each dialogue; short ones where the model's context is small.

    A scored token needs the output matrix, which can make it several times as dear as one of the context.
    """
    text = files("paceline").joinpath("data/quality.txt").read_text(encoding="utf-8")
    windows: list[tuple[str, str]] = []
    for dialogue in text.split("\n\n\n"):
        # One token stands for a character at worst, and the template takes some too.
        dialogue = dialogue.strip()[: max(8, min(QUALITY_CHARACTERS, context_tokens - 64))]
        cut = max(1, round(len(dialogue) * (1 - QUALITY_SCORED)))
        windows.append((dialogue[:cut], dialogue[cut:]))
    return windows
