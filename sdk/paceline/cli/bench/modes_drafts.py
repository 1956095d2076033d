"""Streams of agent turns, plain and with each drafter: what drafting brings, and that it changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.cli.bench.base import Goal, say, summary
from paceline.cli.bench.modes_base import ModesBench
from paceline.cli.bench.trajectories import load_turns, spread
from paceline.measured import Measured, run_measured
from paceline_engine.mode import Drafter, Mode, Variant
from paceline_engine.request import Prompt
from paceline_policies.modes import candidate_modes

STREAM_TOKENS = 64
N_STREAMS = 5
TARGETS = (Variant.BF16, Variant.INT8)
"""Variants that are drafted for: int4 drafts for both."""
MIN_SELF_SPEEDUP = 1.5
MIN_BEST_SPEEDUP = 2.0


@dataclass(slots=True, kw_only=True)
class _Streams:
    """One mode's streams so far."""

    mode: Mode
    tpot_ms: list[float] = field(default_factory=list[float])
    drafted: int = 0
    accepted: int = 0

    def add(self, run: Measured) -> None:
        tpot_ms = run.timeline.tpot_ms()
        assert tpot_ms is not None, "a stream of a benchmark runs to its end"
        self.tpot_ms.append(tpot_ms)
        self.drafted += run.timeline.drafted_tokens
        self.accepted += run.timeline.accepted_tokens

    def row(self) -> dict[str, Any]:
        row = summary(self.tpot_ms, "ms")
        if self.drafted:
            row |= {"drafted": self.drafted, "acceptance": self.accepted / self.drafted}
        return row


async def measure_drafts(bench: ModesBench, data: Path | None) -> None:
    """Greedy streams: TPOT and acceptance of each mode, and the speed-ups stream by stream.

    A stream must have the same tokens with every drafter. Passes of other sizes add up in another order, so
    one may differ where two tokens are equally likely within rounding: ``difference`` shows whether it is so.
    """
    turns = spread(load_turns(data), 2 if bench.quick else N_STREAMS)
    room = min(bench.info.context_tokens, bench.kv_tokens) - STREAM_TOKENS
    prompts = [
        prompt for turn in turns if (prompt := await bench.backend.prepare(turn.messages)).n_tokens <= room
    ]
    if not prompts:
        say(f"no turn of at most {room} tokens: drafts are left out")
        return
    found = [_Streams(mode=mode) for mode in candidate_modes(bench.info) if mode.variant in TARGETS]
    differences: list[dict[str, Any]] = []
    n_compared = 0
    for number, prompt in enumerate(prompts):
        plain: dict[Variant, tuple[Mode, Measured]] = {}
        for streams in found:
            mode = streams.mode
            run = await run_measured(bench.backend, prompt, mode, max_tokens=STREAM_TOKENS)
            streams.add(run)
            before, reference = plain.setdefault(mode.variant, (mode, run))
            n_compared += mode is not before
            if run.token_ids != reference.token_ids:
                at = n_common(run.token_ids, reference.token_ids)
                differences.append(
                    {"stream": number, "mode": mode.label}
                    | await difference(bench, prompt, before, mode, at=at)
                )
        say(f"stream {number + 1} of {len(prompts)}")
    for streams in found:
        bench.results[f"{streams.mode.label}_tpot_stream"] = streams.row()
    _lossless(bench, differences, n_compared)
    _speedups(bench, [streams for streams in found if streams.mode.variant is Variant.BF16])


async def difference(
    bench: ModesBench, prompt: Prompt, plain: Mode, drafted: Mode, *, at: int
) -> dict[str, Any]:
    """Run both again and say whether their first difference is one of rounding.

    It is where the two likeliest tokens are no further apart than two log probabilities can move: twice the
    most by which those of the same tokens, after the same tokens, differ between the two runs before there.
    """
    one, other = [
        (await run_measured(bench.backend, prompt, mode, max_tokens=at + 1, logprobs=2)).logprobs
        for mode in (plain, drafted)
    ]
    rounding = 0.0
    for left, right in zip(one, other, strict=True):
        if left.token_id != right.token_id:
            break
        known = {token_id: logprob for token_id, _, logprob in right.top}
        moved = [abs(known[token_id] - value) for token_id, _, value in left.top if token_id in known]
        rounding = max(rounding, *moved, 0.0)
    (_, _, first), (_, _, second) = one[at].top[:2]
    return {
        "token": at,
        "gap_nats": first - second,
        "rounding_nats": rounding,
        "within_rounding": first - second <= 2 * rounding,
    }


def n_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens before the first difference."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))


def _lossless(bench: ModesBench, differences: list[dict[str, Any]], n_compared: int) -> None:
    if not n_compared:
        return
    bench.details["differences"] = differences
    lossy = sum(not each["within_rounding"] for each in differences)
    bench.results["identical_streams"] = {
        "unit": "share of drafted streams",
        "value": 1 - len(differences) / n_compared,
        "n": n_compared,
    }
    bench.goals.append(Goal(name="lossless_streams", value=1 - lossy / n_compared, goal=1.0, better="higher"))


def _speedups(bench: ModesBench, found: Sequence[_Streams]) -> None:
    """Plain TPOT over that of the drafting model, and over that of the best drafter of each stream."""
    plain = next((each for each in found if each.mode.speculation is None), None)
    drafting = [each for each in found if each.mode.speculation is not None]
    with_model = [
        each for each in drafting if each.mode.speculation and each.mode.speculation.drafter is Drafter.SELF
    ]
    for name, group, least in (
        ("self_speedup", with_model, MIN_SELF_SPEEDUP),
        ("best_drafter_speedup", drafting, MIN_BEST_SPEEDUP),
    ):
        if plain is not None and group:
            best = [min(values) for values in zip(*(each.tpot_ms for each in group), strict=True)]
            ratios = [alone / drafted for alone, drafted in zip(plain.tpot_ms, best, strict=True)]
            bench.ratio_goal(name, ratios, "times plain bf16", least=least)
