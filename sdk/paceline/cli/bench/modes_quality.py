"""What each precision costs in quality on agent dialogue, in windows of equal length."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from paceline.calibrate_quality import HeldText, measure_quality
from paceline.cli.bench.base import Goal, say
from paceline.cli.bench.modes_base import ModesBench
from paceline.cli.bench.modes_drafts import n_common
from paceline.cli.bench.trajectories import load_turns
from paceline.policy import Served
from paceline_engine.backends.base import Backend
from paceline_engine.mode import Variant

WINDOW_TOKENS = 512
N_WINDOWS = 6
MAX_PERPLEXITY_RATIO: Mapping[Variant, float] = MappingProxyType(
    {Variant.INT8: 1.005, Variant.FP8: 1.015, Variant.INT4: 1.10}
)


async def measure_fidelity(bench: ModesBench, data: Path | None) -> None:
    """Perplexity ratio, divergence and agreement of each variant beside bf16."""
    n_windows = 1 if bench.quick else N_WINDOWS
    windows = await dialogue_windows(bench.backend, data, n=n_windows, size=WINDOW_TOKENS)
    if not windows:
        say(f"no conversation of {WINDOW_TOKENS} tokens: quality is left out")
        return
    served = Served(backend=bench.backend, info=bench.info)
    found = await measure_quality(served, windows, on_share=lambda share: say(f"quality, {share:.0%}"))
    for variant, quality in found.items():
        bench.results[f"{variant}_quality"] = {
            "unit": "times bf16's perplexity",
            "value": quality.perplexity_ratio,
            "deviation": quality.deviation,
            "kl_nats": quality.kl_nats,
            "top1_agreement": quality.top1_agreement,
            "n_tokens": quality.n_tokens,
        }
        if variant in MAX_PERPLEXITY_RATIO and quality.perplexity_ratio is not None:
            bench.goals.append(
                Goal(
                    name=f"{variant}_perplexity_ratio",
                    value=quality.perplexity_ratio,
                    goal=MAX_PERPLEXITY_RATIO[variant],
                    better="lower",
                )
            )


async def dialogue_windows(backend: Backend, data: Path | None, *, n: int, size: int) -> list[HeldText]:
    """``n`` windows (or all), spread over the conversations as the model would read them.

    What a conversation begins with as the first one does, its instructions, is left out. Each window begins
    with the token that begins the conversations.
    """
    whole: dict[int, tuple[int, ...]] = {}
    for turn in load_turns(data):
        # The last turn of a conversation has seen all the others.
        whole[turn.conversation] = (await backend.prepare(turn.messages)).token_ids
    first, *others = whole.values()
    texts = [first[1:], *(ids[n_common(ids, first) :] for ids in others)]
    windows = [
        HeldText(token_ids=(first[0], *ids[start : start + size - 1]))
        for ids in texts
        for start in range(0, len(ids) - size + 2, size - 1)
    ]
    n = min(n, len(windows))
    return [windows[index * len(windows) // n] for index in range(n)]
