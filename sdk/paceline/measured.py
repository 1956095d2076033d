"""A request of our own, run to its end: for calibration and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import uuid4

from paceline_engine.backends.base import Backend
from paceline_engine.chunk import TokenLogprob
from paceline_engine.mode import Mode
from paceline_engine.plan import Plan
from paceline_engine.request import GenerationRequest, Prompt, SamplingParams
from paceline_engine.timeline import Timeline

STALL_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a request brought forth, and when."""

    timeline: Timeline
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of each token, where they were asked for."""


async def run_measured(
    backend: Backend, prompt: Prompt, mode: Mode, *, max_tokens: int, logprobs: int | None = None
) -> Measured:
    """Run a greedy request until ``max_tokens`` are out, end tokens or not.

    Args:
        logprobs: how many of the most likely tokens are told of each position; None for none.

    Raises what ``Backend.submit`` does.
    """
    request = GenerationRequest(
        id=uuid4().hex, prompt=prompt, ignore_eos=True, sampling=SamplingParams(logprobs=logprobs)
    )
    plan = Plan(mode=mode, max_tokens=max_tokens, stall_limit_s=STALL_LIMIT_S)
    timeline: Timeline | None = None
    token_ids: list[int] = []
    found: list[TokenLogprob] = []
    async for chunk in backend.submit(request, plan):
        token_ids += chunk.token_ids
        found += chunk.logprobs or ()
        if chunk.finish is not None:
            timeline = chunk.finish.timeline
    assert timeline is not None, "a backend's stream ends with a finish"
    return Measured(timeline=timeline, token_ids=tuple(token_ids), logprobs=tuple(found))
