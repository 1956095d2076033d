"""Step states made of numbers, and a machine that runs what a policy decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from paceline_engine.mode import Mode, Variant
from paceline_engine.plan import Plan
from paceline_engine.schedule.base import SequenceKey, SequenceView, StepState
from paceline_engine.timeline import StepTime
from paceline_policies.pacing import Pacer, StepNumbers
from paceline_policies.pacing.numbers import VariantNumbers
from paceline_policies.step_model import StepModel

FIXED_S = {Variant.BF16: 0.050, Variant.INT8: 0.030, Variant.INT4: 0.020}


def numbers(scale: float = 1.0) -> StepNumbers:
    """A decode step takes 51, 31 or 21 ms; a prompt token 2 ms."""
    return StepNumbers(
        variants={
            variant: VariantNumbers(
                step=StepModel(
                    fixed_s=fixed * scale,
                    chunk_s=0.002 * scale,
                    small_s=0.002 * scale,
                    large_s=0.002 * scale,
                    decode_s=0.001 * scale,
                )
            )
            for variant, fixed in FIXED_S.items()
        }
    )


def view(name: str, **fields: Any) -> SequenceView:
    """A stream that decodes, or with ``remaining_tokens`` a prompt."""
    plan_fields = {
        key: fields.pop(key)
        for key in (
            "deadline_at_s",
            "first_token_by_s",
            "tpot_target_s",
            "fallback_variants",
            "max_tokens",
        )
        if key in fields
    }
    variant = fields.pop("variant", Variant.BF16)
    mode = fields.pop("mode", Mode(variant=fields.pop("planned", variant)))
    defaults: dict[str, Any] = {
        "submitted_at_s": 0.0,
        "arrival": 0,
        "computed_tokens": 32,
        "remaining_tokens": 1,
        "output_tokens": 1,
        "first_token_at_s": 100.0,
        "last_token_at_s": 100.0,
    }
    if fields.get("remaining_tokens", 1) > 1:
        defaults |= {
            "output_tokens": 0,
            "computed_tokens": 0,
            "first_token_at_s": None,
            "last_token_at_s": None,
        }
    return SequenceView(
        key=SequenceKey(request_id=name, index=0),
        plan=Plan(mode=mode, **({"max_tokens": 64} | plan_fields)),
        variant=variant,
        **(defaults | fields),
    )


def state(
    decoding: tuple[SequenceView, ...] = (), prefilling: tuple[SequenceView, ...] = (), **fields: Any
) -> StepState:
    return StepState(
        **(
            {
                "now_s": 100.0,
                "decoding": decoding,
                "prefilling": prefilling,
                "free_blocks": 100,
                "block_size": 16,
                "max_prefill_tokens": 256,
            }
            | fields
        )
    )


@dataclass
class Stream:
    """One stream of the simulated machine."""

    view: SequenceView
    moves: list[tuple[int, Variant]] = field(default_factory=list[tuple[int, Variant]])


class Machine:
    """Steps streams as a policy decides, each pass ``slow(now)`` times slower than the numbers say."""

    def __init__(self, policy: Pacer, *, truth: StepNumbers, slow: Callable[[float], float]) -> None:
        self.policy = policy
        self.truth = truth
        self.slow = slow
        self.now_s = 100.0
        self.streams: list[Stream] = []
        self.prompts: list[SequenceView] = []
        self.previous: tuple[StepTime, ...] = ()
        self.chunks: list[int] = []
        self.step_s: list[float] = []

    def step(self) -> None:
        seen = state(
            tuple(stream.view for stream in self.streams),
            tuple(self.prompts),
            now_s=self.now_s,
            previous=self.previous,
        )
        decision = self.policy.decide_step(seen)
        for stream in self.streams:
            to = decision.variants.get(stream.view.key)
            if to is not None and to is not stream.view.variant:
                stream.moves.append((stream.view.output_tokens, to))
                stream.view = replace(
                    stream.view,
                    variant=to,
                    variant_changes=stream.view.variant_changes + 1,
                    variant_since_tokens=stream.view.output_tokens,
                )
        taken = self._prefill(decision.prefill_order, decision.prefill_tokens)
        began_s = self.now_s
        steps: list[StepTime] = []
        for variant in FIXED_S:
            own = [stream.view for stream in self.streams if stream.view.variant is variant]
            prefill = sum(count for prompt, count in taken if prompt.variant is variant)
            if own or prefill:
                steps.append(self._pass(variant, len(own), prefill))
        self.previous = tuple(steps)
        self.chunks.append(sum(count for _, count in taken))
        self.step_s.append(self.now_s - began_s)
        for stream in self.streams:
            stream.view = replace(
                stream.view,
                output_tokens=stream.view.output_tokens + 1,
                computed_tokens=stream.view.computed_tokens + 1,
                last_token_at_s=self.now_s,
            )
        self.streams = [each for each in self.streams if each.view.output_tokens < each.view.plan.max_tokens]

    def _pass(self, variant: Variant, decode: int, prefill: int) -> StepTime:
        seconds = self.truth.variants[variant].pass_s(prefill=prefill, decode=decode, context=0.0, pairs=0.0)
        began_s, self.now_s = self.now_s, self.now_s + seconds * self.slow(self.now_s)
        return StepTime(
            started_at_s=began_s,
            ended_at_s=self.now_s,
            variant=variant,
            prefill_tokens=prefill,
            decode_tokens=decode,
            n_sequences=decode + (prefill > 0),
            context_tokens=0,
            attended_pairs=0,
        )

    def _prefill(self, order: tuple[SequenceKey, ...], budget: int) -> list[tuple[SequenceView, int]]:
        by_key = {prompt.key: prompt for prompt in self.prompts}
        taken: list[tuple[SequenceView, int]] = []
        for key in order:
            prompt = by_key[key]
            count = min(budget, prompt.remaining_tokens)
            if count < 1:
                break
            budget -= count
            taken.append((prompt, count))
            by_key[key] = replace(
                prompt,
                computed_tokens=prompt.computed_tokens + count,
                remaining_tokens=prompt.remaining_tokens - count,
            )
        self.prompts = [prompt for prompt in by_key.values() if prompt.remaining_tokens > 0]
        return taken


@dataclass(frozen=True)
class Kit:
    """What the tests of this folder build with."""

    numbers: Callable[..., StepNumbers] = numbers
    view: Callable[..., SequenceView] = view
    state: Callable[..., StepState] = state
    machine: Callable[..., Machine] = Machine
    stream: Callable[..., Stream] = Stream


@pytest.fixture
def kit() -> Kit:
    return Kit()
