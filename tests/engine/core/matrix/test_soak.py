"""A long run of everything at once, on a real model in fp32: outputs are as alone, and no block is lost."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("llguidance", reason="grammars need llguidance")

from paceline_engine.chunk import FinishReason
from paceline_engine.grammar.base import Grammar
from paceline_engine.mode import Drafter, Speculation, Variant
from paceline_engine.request import SamplingParams

N_REQUESTS = 2000
GRAMMARS = (Grammar.regex(r"[A-F]{2,8}\."), Grammar.json_schema({"enum": ["yes", "no", 12]}))
LENGTHS = (1, 4, 6, 8, 11, 12)
PREFIXES = tuple(tuple(range(60 + 9 * i, 60 + 9 * i + length)) for i, length in enumerate(LENGTHS))


def leaning(seen: Sequence[int], logits: torch.Tensor) -> None:
    """Let the model tend to repeat its token of four places before, so that n-grams are often right."""
    if len(seen) >= 4:
        logits[seen[-4]] += 2


class Traffic:
    """Random requests, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def prompt(self) -> list[int]:
        rng = self.rng
        return [*rng.choice(PREFIXES), *(rng.randrange(48, 122) for _ in range(rng.randint(0, 7)))]

    def request(self) -> dict[str, Any]:
        """What is drawn, and when it ends; how it runs is ``plan``'s."""
        rng = self.rng
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 0.7, 1.3]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 0, 12]),
            min_p=rng.choice([0.0, 0.0, 0.02]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
            presence_penalty=rng.choice([0.0, 0.4]),
            frequency_penalty=rng.choice([0.0, 0.2]),
            logit_bias=rng.choice([{}, {}, {65: 2.0, 300: -9.0}]),
            min_tokens=rng.choice([0, 0, 3]),
            logprobs=rng.choice([None, None, 1]),
            seed=rng.randrange(1000),
        )
        request: dict[str, Any] = {
            "prompt": self.prompt(),
            "max_tokens": rng.randint(1, 10),
            "sampling": sampling,
            "n": rng.choice([1, 1, 1, 1, 1, 1, 2, 3]),
            "stop": rng.choice([(), (), ("A",), ("ab", "DEF"), ("\ufffd",)]),
            "stop_token_ids": rng.choice([(), (65, 70, 75)]),
        }
        if rng.random() < 0.05:
            request |= {"grammar": rng.choice(GRAMMARS), "max_tokens": rng.randint(9, 12)}
        return request

    def plan(self) -> dict[str, Any]:
        rng = self.rng
        speculation = rng.choice(
            [
                None,
                Speculation(drafter=Drafter.NGRAM, max_draft_tokens=rng.randint(1, 6)),
                Speculation(
                    drafter=Drafter.SELF,
                    max_draft_tokens=rng.randint(1, 5),
                    draft_variant=rng.choice([Variant.INT8, Variant.INT4]),
                ),
            ]
        )
        return {
            "variant": rng.choice(list(Variant)),
            "speculation": speculation,
            "prefix_cache": rng.random() < 0.8,
            "mix_cache": rng.random() < 0.3,
            "batch_cap": rng.choice([2, 5, 12, 12, 12]),
            "tpot_target_s": rng.choice([None, 0.04, 0.5]),
            "fallback_variants": rng.choice([(), (Variant.INT8, Variant.INT4)]),
        }


@pytest.mark.parametrize("seed", [20])
def test_two_thousand_requests(every_case: list[Any], open_case: Callable[..., Any], seed: int) -> None:
    """Cancelled, preempted, drafted, moved and scored requests in one engine.

    What ended by itself equals its solo run; what was cancelled is a prefix of it.
    """
    (case,) = (
        one
        for one in every_case
        if (one.variant, one.drafter, one.policy) == (Variant.FP32, "none", "moving")
    )
    traffic = Traffic(seed)
    rng = traffic.rng
    bench = open_case(case, max_prefill_tokens_per_step=9, max_sequences=12)
    bench.runner.change_row = leaning
    requests: dict[str, dict[str, Any]] = {}
    scores: dict[str, list[int]] = {}
    cancelled: set[str] = set()
    options = ("the ", "AB", " is true")

    def cancel() -> None:
        if rng.random() < 0.01:
            name = f"{len(requests) - rng.randint(1, 12)}"
            cancelled.add(name)
            bench.engine.abort(name)

    bench.runner.before_pass = cancel
    for i in range(N_REQUESTS):
        name = str(i)
        if rng.random() < 0.05:
            scores[f"score {name}"] = traffic.prompt()
            bench.score(f"score {name}", scores[f"score {name}"], options, bench.plan(1, **traffic.plan()))
        request = requests[name] = traffic.request()
        fields = {key: value for key, value in request.items() if key != "max_tokens"}
        plan = bench.plan(request["max_tokens"], **traffic.plan())
        bench.submit(name, plan=plan, salt=rng.choice(["", "", "t"]), **fields)
        if rng.random() < 0.1:
            bench.engine.change_variant(str(i - rng.randint(0, 6)), rng.choice(list(Variant)))
        if rng.random() < 0.05:
            bench.engine.pin("kept", traffic.prompt(), hold_s=2.0)
        while len(bench.engine._ledger.requests) > 14 or rng.random() < 0.3:
            bench.step()
    out = bench.run(most=100_000)
    bench.engine.unpin("kept")
    assert not out.errors, (seed, out.errors)
    _check_that_it_was_hard(out, requests)
    plain = open_case(case.plain)
    plain.runner.change_row = leaning
    for name, request in requests.items():
        fields = {key: value for key, value in request.items() if key != "max_tokens"}
        plain.submit(name, plan=plain.plan(request["max_tokens"]), **fields)
        plain.run()
        for index in range(request["n"]):
            found, alone = bench.outcome(name, index), plain.outcome(name, index)
            if out.finish(name, index).reason is FinishReason.CANCELLED:
                assert name in cancelled, (seed, name)
                assert found[0] == alone[0][: len(found[0])], (seed, name, request)
            else:
                assert found == alone, (seed, name, request)
    for name, prompt in scores.items():
        plain.score(name, prompt, options, plain.plan(1))
        alone = plain.run().scores[name].scores
        for one, two in zip(out.scores[name].scores, alone, strict=True):
            assert one.logprob == pytest.approx(two.logprob, abs=1e-3), (seed, name, prompt)


def _check_that_it_was_hard(out: Any, requests: dict[str, dict[str, Any]]) -> None:
    """All that may go wrong was tried, and often."""
    finishes = [out.finish(name, index) for name, one in requests.items() for index in range(one["n"])]
    events = [event.name for finish in finishes for event in finish.timeline.events]
    reasons = [finish.reason for finish in finishes]
    assert events.count("preempted") > 50
    assert events.count("variant_changed") > 50
    assert reasons.count(FinishReason.CANCELLED) > 30
    assert reasons.count(FinishReason.STOP) > 200
    assert sum(finish.timeline.accepted_tokens for finish in finishes) > 500
    assert sum(finish.usage.cached_tokens for finish in finishes) > 1000
