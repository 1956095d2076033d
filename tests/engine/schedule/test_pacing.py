"""The step policy over a real engine: a tiny model that streams while a long prompt is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline_engine.core import Engine, EngineConfig
from paceline_engine.loading import open_checkpoint, open_tokenizer
from paceline_engine.mode import Mode, Variant
from paceline_engine.model.base import SequenceSlice
from paceline_engine.model.runner import TorchRunner
from paceline_engine.plan import Plan
from paceline_engine.request import GenerationRequest, Prompt
from paceline_engine.schedule.base import StepDecision, StepState
from paceline_engine.timeline import Timeline
from paceline_policies.pacing import Pacer, StepNumbers
from paceline_policies.pacing.numbers import VariantNumbers
from paceline_policies.step_model import StepModel

FIXED_S = {Variant.BF16: 0.050, Variant.INT8: 0.030, Variant.INT4: 0.020}
NUMBERS = StepNumbers(
    variants={
        variant: VariantNumbers(
            step=StepModel(fixed_s=fixed, chunk_s=0.002, small_s=0.002, large_s=0.002, decode_s=0.001)
        )
        for variant, fixed in FIXED_S.items()
    }
)
TARGET_S = 0.2
LONG = 480


class Watched:
    """A policy with its decisions and the states that they follow from."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.seen: list[tuple[StepState, StepDecision]] = []

    def decide_step(self, state: StepState) -> StepDecision:
        decision: StepDecision = self.policy.decide_step(state)
        self.seen.append((state, decision))
        return decision


class Run:
    """An engine over a real runner whose passes take the time that the numbers say, on a clock of its own."""

    def __init__(self, model: Any, cache: Path, *, slow: float = 1.0) -> None:
        folder = str(model.safetensors)
        self.runner = TorchRunner.load(
            open_checkpoint(folder),
            variants=(Variant.BF16, Variant.INT8, Variant.INT4),
            n_blocks=128,
            block_size=16,
            cache_dir=cache,
        )
        self.now_s = 100.0
        self.slow = slow
        self.truth = NUMBERS
        self.policy = Watched(Pacer(NUMBERS))
        self.forward = self.runner.forward
        self.runner.forward = self._forward  # type: ignore[method-assign]
        self.engine = Engine(
            self.runner,
            open_tokenizer(folder),
            config=EngineConfig(max_prefill_tokens_per_step=256),
            step_policy=self.policy,
            clock=lambda: self.now_s,
        )
        self.ended: dict[str, Timeline] = {}
        self.made: dict[str, list[float]] = {}

    def _forward(self, slices: Any, variant: Variant) -> Any:
        parts: list[SequenceSlice] = list(slices)
        prefill = sum(len(part.token_ids) for part in parts if len(part.token_ids) > 1)
        decode = sum(len(part.token_ids) == 1 for part in parts)
        seconds = self.truth.variants[variant].pass_s(prefill=prefill, decode=decode, context=0, pairs=0)
        self.now_s += seconds * self.slow
        return self.forward(parts, variant)

    def submit(self, name: str, token_ids: list[int], **plan: Any) -> None:
        request = GenerationRequest(
            id=name,
            prompt=Prompt(messages=(), token_ids=tuple(token_ids), n_tokens=len(token_ids)),
            ignore_eos=True,
        )
        mode = Mode(variant=Variant.BF16)
        self.engine.submit(request, Plan(mode=mode, **plan), submitted_at_s=self.now_s)

    def run(self, steps: int | None = None) -> None:
        while self.engine.has_work and steps != 0:
            output = self.engine.step()
            assert not output.errors
            for name, chunk in output.chunks:
                self.made.setdefault(name, []).append(chunk.made_at_s)
                if chunk.finish is not None:
                    self.ended[name] = chunk.finish.timeline
            steps = None if steps is None else steps - 1


@pytest.fixture
def start(tiny_model: Callable[..., Any], tmp_path: Path) -> Callable[..., Run]:
    return lambda **options: Run(tiny_model("llama"), tmp_path, **options)


def test_streams_keep_their_pace_while_a_long_prompt_is_read(start: Callable[..., Run]) -> None:
    """A prompt of 480 tokens is read in chunks that leave three streams a token within every target."""
    run = start()
    for name in "abc":
        run.submit(name, [3, 4, 5], max_tokens=40, tpot_target_s=TARGET_S)
    run.run(steps=4)
    run.submit("long", [5 + i % 50 for i in range(LONG)], max_tokens=2)
    run.run()
    beside = [
        decision.prefill_tokens for state, decision in run.policy.seen if state.decoding and state.prefilling
    ]
    assert len(beside) > LONG / 80
    assert all(40 <= chunk <= 70 for chunk in beside)
    for name in "abc":
        gaps = [after - before for before, after in zip(run.made[name], run.made[name][1:], strict=False)]
        assert max(gaps) <= TARGET_S
    steps = [step.prefill_tokens for step in run.ended["long"].steps if step.prefill_tokens]
    assert sum(steps) == LONG
    assert max(steps) <= 70


def test_without_targets_the_same_prompt_is_read_in_full_chunks(start: Callable[..., Run]) -> None:
    """Where no stream has a target, a prompt is held back by nothing."""
    run = start()
    run.submit("a", [3, 4, 5], max_tokens=40)
    run.run(steps=4)
    run.submit("long", [5 + i % 50 for i in range(LONG)], max_tokens=2)
    run.run()
    assert [step.prefill_tokens for step in run.ended["long"].steps if step.prefill_tokens] == [256, 224]


def test_a_stream_alone_that_falls_behind_catches_up(start: Callable[..., Run]) -> None:
    """Alone on a slow machine the stream moves down within some tokens, and its mean keeps the target."""
    run = start(slow=2.0)
    run.submit(
        "a", [3, 4, 5], max_tokens=60, tpot_target_s=0.07, fallback_variants=(Variant.INT8, Variant.INT4)
    )
    run.run()
    events = [event for event in run.ended["a"].events if event.name == "variant_changed"]
    assert events[0].attributes["from"] == "bf16"
    assert events[0].attributes["to"] in ("int8", "int4")
    assert events[0].attributes["why"].startswith("behind: ")
    assert {step.variant for step in run.ended["a"].steps} >= {Variant.BF16, events[0].attributes["to"]}
    tpot_ms = run.ended["a"].tpot_ms()
    assert tpot_ms is not None
    assert tpot_ms <= 75
