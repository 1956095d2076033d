"""The step loop over real, tiny models in fp32, against the reference implementation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline_engine.core import Engine, EngineConfig
from paceline_engine.loading import open_checkpoint, open_tokenizer
from paceline_engine.mode import Drafter, Speculation, Variant
from paceline_engine.model.runner import TorchRunner
from paceline_engine.request import SamplingParams

MakeTiny = Callable[..., Any]


@pytest.fixture
def make_tiny(make_bench: Callable[..., Any], tmp_path: Path) -> MakeTiny:
    """A bench whose engine runs a tiny model's fp32 weights."""

    def make(model: Any, n_blocks: int, *drafting: Variant, **config: Any) -> Any:
        checkpoint = open_checkpoint(str(model.safetensors))
        runner = TorchRunner.load(
            checkpoint,
            variants=(Variant.FP32, *drafting),
            n_blocks=n_blocks,
            block_size=4,
            kv_dtype=torch.float32,
            cache_dir=tmp_path,
        )
        bench = make_bench()
        bench.runner = runner
        bench.tokenizer = open_tokenizer(str(model.safetensors))
        bench.engine = Engine(
            runner,
            bench.tokenizer,
            config=EngineConfig(max_prefill_tokens_per_step=5, **config),
            clock=bench.clock,
        )
        return bench

    return make


def reference_ids(model: Any, prompt: list[int], n: int) -> list[int]:
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(n):
            ids.append(int(model.reference(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


PROMPTS = {"a": [3, 4, 5, 6, 7, 8], "b": [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], "c": [20, 21, 22]}


@pytest.mark.parametrize("family", ["gemma3", "llama", "qwen3"])
def test_greedy_equals_the_reference(family: str, tiny_model: Any, make_tiny: MakeTiny) -> None:
    """Unequal prompts in one batch, chunked, from a cold and a warm cache and under preemption."""
    model = tiny_model(family)
    bench = make_tiny(model, 10)
    plan = bench.plan(9, Variant.FP32)
    for name, prompt in PROMPTS.items():
        bench.submit(name, prompt, plan, ignore_eos=True)
        bench.submit(name * 2, prompt, plan, ignore_eos=True)
    out = bench.run()
    assert not out.errors
    for name, prompt in PROMPTS.items():
        expected = reference_ids(model, prompt, 9)
        assert out.ids(name) == out.ids(name * 2) == expected
        assert out.text(name) == bench.tokenizer.decode(expected)
    assert bench.free == 10


def test_scores_equal_the_reference(tiny_model: Any, make_tiny: MakeTiny) -> None:
    """Options' log probabilities are the reference's."""
    model = tiny_model("gemma3")
    bench = make_tiny(model, 40)
    prompt = PROMPTS["a"]
    options = (" the tool", " it", " the weather in Oslo")
    bench.score("s", prompt, options, bench.plan(1, Variant.FP32))
    scores = bench.run().scores["s"].scores
    for text, score in zip(options, scores, strict=True):
        ids = bench.tokenizer.encode(text)
        with torch.inference_mode():
            logits = model.reference(torch.tensor([[*prompt, *ids]])).logits[0].log_softmax(-1)
        expected = sum(float(logits[len(prompt) - 1 + i, token]) for i, token in enumerate(ids))
        assert score.logprob == pytest.approx(expected, abs=1e-3)


def test_choices_diverge_inside_a_block(tiny_model: Any, make_tiny: MakeTiny) -> None:
    """Sampled choices of a prompt of one and a half blocks equal a second run from the cache."""
    bench = make_tiny(tiny_model("llama"), 40)
    sampling = SamplingParams(temperature=1.0, seed=11)
    for name in ("x", "y"):
        bench.submit(name, PROMPTS["a"], bench.plan(8, Variant.FP32), sampling=sampling, n=3, ignore_eos=True)
        bench.run()
    streams = [bench.out.ids("x", index) for index in range(3)]
    assert len({tuple(ids) for ids in streams}) == 3
    assert streams == [bench.out.ids("y", index) for index in range(3)]


@pytest.mark.parametrize("family", ["gemma3", "mistral", "qwen2"])
@pytest.mark.parametrize("variant", [Variant.INT4, Variant.INT8])
@pytest.mark.parametrize("n_blocks", [10, 40])
def test_speculation_equals_the_reference(
    family: str, variant: Variant, n_blocks: int, tiny_model: Any, make_tiny: MakeTiny
) -> None:
    """Greedy fp32 tokens are the reference's with drafts of the model itself or of n-grams, and without.

    Past the sliding windows, streams of every kind in one batch, with and without preemption.
    """
    model = tiny_model(family)
    bench = make_tiny(model, n_blocks, variant, adapt_drafts=False)
    kinds = {
        "self": Speculation(drafter=Drafter.SELF, max_draft_tokens=4, draft_variant=variant),
        "ngram": Speculation(drafter=Drafter.NGRAM, max_draft_tokens=6),
        "none": None,
    }
    for name, prompt in PROMPTS.items():
        for kind, speculation in kinds.items():
            plan = bench.plan(20, Variant.FP32, speculation=speculation)
            bench.submit(name + kind, prompt, plan, ignore_eos=True)
    out = bench.run()
    assert not out.errors
    accepted = 0
    for name, prompt in PROMPTS.items():
        expected = reference_ids(model, prompt, 20)
        for kind in kinds:
            assert out.ids(name + kind) == expected, (name, kind)
            accepted += out.finish(name + kind).timeline.accepted_tokens
    assert accepted > 0
    assert bench.free == n_blocks
