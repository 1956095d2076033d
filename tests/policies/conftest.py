"""A simulated machine: steps of known cost with noise, run by a loop like an engine's."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from paceline_engine.backends.base import ModelInfo
from paceline_engine.mode import Mode, Variant
from paceline_engine.snapshot import Snapshot
from paceline_engine.timeline import StepTime, Timeline, TokenTime
from paceline_policies.calibration import Probe, fit_profile, probes
from paceline_policies.predictor import Predictor
from paceline_policies.quality import Quality

CHUNK = 512
DECODE_S = {Variant.BF16: 0.030, Variant.INT8: 0.012, Variant.INT4: 0.007}
PREFILL_S = {Variant.BF16: 0.0022, Variant.INT8: 0.0008, Variant.INT4: 0.0015}
QUALITY = {Variant.BF16: 1.0, Variant.INT8: 0.998, Variant.INT4: 0.87}


@dataclass
class Machine:
    """Runs one request at a time, beside ``running`` sequences that only decode."""

    seed: int = 0
    noise: float = 0.05
    """Log deviation of each step."""
    slow_share: float = 0.0
    """Share of generations that run up to several times slower (a Pareto tail)."""
    slowdown: float = 1.0
    now_s: float = 100.0
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def true_step_s(self, variant: Variant, prefill: int, decode: int, context: int, pairs: int) -> float:
        """The truth without noise: a roofline of reading the weights and computing."""
        compute = prefill * PREFILL_S[variant]
        base = max(DECODE_S[variant], compute) + 0.1 * min(DECODE_S[variant], compute)
        return self.slowdown * (0.001 + base + 0.002 * decode + 3e-6 * context + 2e-8 * pairs)

    def run(
        self,
        mode: Mode,
        *,
        prompt: int,
        output: int,
        cached: int = 0,
        running: int = 0,
        running_context: int = 0,
        with_steps: bool = True,
    ) -> Timeline:
        rng = self.random
        hit = rng.paretovariate(2.0) if rng.random() < self.slow_share else 1.0
        submitted = self.now_s
        at = started = submitted + 0.002
        steps: list[StepTime] = []
        done = cached

        def step(prefill: int, decode: int, context: int, pairs: int) -> None:
            nonlocal at
            seconds = self.true_step_s(mode.variant, prefill, decode, context, pairs)
            seconds *= hit * rng.lognormvariate(0, self.noise)
            steps.append(
                StepTime(
                    started_at_s=at,
                    ended_at_s=at + seconds,
                    variant=mode.variant,
                    prefill_tokens=prefill,
                    decode_tokens=decode,
                    n_sequences=running + 1,
                    context_tokens=context,
                    attended_pairs=pairs,
                )
            )
            at += seconds

        while done < prompt:
            size = min(CHUNK, prompt - done)
            pairs = size * done + size * (size + 1) // 2 + running_context
            done += size
            step(size, running, running_context + done, pairs)
            at += 0.0003
        tokens = [TokenTime(made_at_s=at)]
        for i in range(output - 1):
            context = running_context + prompt + i + 1
            step(0, running + 1, context, context)
            at += 0.0003
            tokens.append(TokenTime(made_at_s=at))
        self.now_s = at + 0.05
        return Timeline(
            mode=mode,
            submitted_at_s=submitted,
            started_at_s=started if with_steps else None,
            tokens=tuple(tokens),
            finished_at_s=at,
            steps=tuple(steps) if with_steps else (),
            prompt_tokens=prompt,
            cached_tokens=cached,
        )

    def probe(self, probe: Probe) -> Timeline:
        mode = Mode(variant=probe.variant, prefix_cache=False)
        beside = probe.concurrency - 1
        return self.run(
            mode,
            prompt=probe.prompt_tokens,
            output=probe.max_tokens,
            running=beside,
            running_context=beside * probe.prompt_tokens,
        )

    def calibrated(self, info: ModelInfo, *, quick: bool = False) -> Predictor:
        runs = [(probe, self.probe(probe)) for probe in probes(info, quick=quick)]
        qualities = {each: Quality(value=QUALITY[each]) for each in info.variants}
        return Predictor(fit_profile(info, runs, version="1", qualities=qualities), chunk_tokens=CHUNK)


@pytest.fixture
def make_machine() -> Callable[..., Machine]:
    return Machine


@pytest.fixture(scope="session")
def info() -> ModelInfo:
    return ModelInfo(
        name="tiny",
        fingerprint="f00d",
        context_tokens=4096,
        vocab_size=1000,
        variants=(Variant.BF16, Variant.INT8, Variant.INT4),
        bytes_per_variant={Variant.BF16: 536_000_000, Variant.INT8: 285_000_000, Variant.INT4: 157_000_000},
        device_name="test processor",
    )


@pytest.fixture(scope="session")
def calibrated(info: ModelInfo) -> Predictor:
    """Shared: tests that let it learn must make their own."""
    return Machine(seed=7).calibrated(info)


@pytest.fixture
def snapshot() -> Callable[..., Snapshot]:
    def make(prompt: int = 256, **fields: object) -> Snapshot:
        return Snapshot(taken_at_s=0.0, prompt_tokens=prompt, **fields)  # type: ignore[arg-type]

    return make
