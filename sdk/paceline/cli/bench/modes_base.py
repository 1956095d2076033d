"""What the parts of the benchmark of modes share: the engine, how often to measure, and what was found."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.cli.bench.base import Goal, summary
from paceline.measured import run_measured
from paceline_engine.backends.base import ModelInfo
from paceline_engine.backends.embedded import EmbeddedBackend
from paceline_engine.mode import Mode
from paceline_engine.request import Prompt
from paceline_engine.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class ModesBench:
    """A started engine, how often to measure, and what was found so far."""

    backend: EmbeddedBackend
    info: ModelInfo
    quick: bool
    ids: random.Random = field(default_factory=lambda: random.Random(0))
    results: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    goals: list[Goal] = field(default_factory=list[Goal])
    details: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def kv_tokens(self) -> int:
        """What the KV cache holds."""
        config = self.backend.config
        return config.block_size * config.blocks(context_tokens=self.info.context_tokens)

    @property
    def rounds(self) -> int:
        return 1 if self.quick else 2

    async def run(self, prompt: Prompt, mode: Mode, max_tokens: int) -> Timeline:
        return (await run_measured(self.backend, prompt, mode, max_tokens=max_tokens)).timeline

    def random_prompt(self, n_tokens: int, *, after: Sequence[int] = ()) -> Prompt:
        """Ids that nothing has cached: what a token is does not change what it costs."""
        token_ids = (*after, *(self.ids.randrange(self.info.vocab_size) for _ in range(n_tokens)))
        return Prompt(messages=(), token_ids=token_ids, n_tokens=len(token_ids))

    def ratio_goal(self, name: str, ratios: Sequence[float], unit: str, *, least: float) -> None:
        """Report ratios that were taken pair by pair, and hold their median to a goal."""
        self.results[name] = summary(ratios, unit)
        self.goals.append(Goal(name=name, value=statistics.median(ratios), goal=least, better="higher"))
