"""What is refused, cancelled or out of room, in every mode: nothing is lost, and nobody else notices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline_engine.chunk import FinishReason
from paceline_engine.errors import InvalidValueError, PromptTooLongError, UnknownOptionError
from paceline_engine.request import SamplingParams

OpenCase = Callable[..., Any]
Solo = Callable[..., Any]

PROMPT = [65, 66, 67, 68, 69, 70, 71]


@pytest.mark.parametrize("n", [1, 2])
def test_cancelling_frees_everything(case: Any, open_case: OpenCase, n: int) -> None:
    """After a token of a long request is out, a cancel leaves nothing running at the next step."""
    bench = open_case(case)
    bench.submit("long", PROMPT, bench.plan(30 if case.crowded else 240), n=n, ignore_eos=True)
    while not bench.out.chunks["long"]:
        bench.step()
    bench.step(2)
    bench.engine.abort("long")
    n_passes = bench.runner.n_passes
    bench.step()
    assert bench.runner.n_passes == n_passes
    assert not bench.engine.has_work
    assert bench.free == bench.runner.n_blocks
    for index in range(n):
        assert bench.out.finish("long", index).reason is FinishReason.CANCELLED


def test_cancelling_during_a_pass(case: Any, open_case: OpenCase, solo: Solo) -> None:
    """A cancel while a pass writes, drafting or not, harms no other stream and gives all blocks back."""
    expected = solo(case, PROMPT[:5], 9, ignore_eos=True)
    for in_pass in range(3, 9, 2):
        bench = open_case(case)
        first = bench.runner

        def cancel(bench: Any = bench, in_pass: int = in_pass, first: Any = first) -> None:
            if first.n_passes == in_pass:
                bench.engine.abort("gone")

        bench.runner.before_pass = cancel
        bench.submit("gone", PROMPT, bench.plan(20), ignore_eos=True)
        bench.submit("stays", PROMPT[:5], bench.plan(9), ignore_eos=True)
        bench.run()
        assert [bench.outcome("stays")] == expected
        assert bench.out.finish("gone").reason is FinishReason.CANCELLED


def test_limits_of_sampling_are_argmax(case: Any, open_case: OpenCase, solo: Solo) -> None:
    """Temperature 0 and 1e-6, top_p 0 and top_k 1 take the best token; top_k 0 and a huge one are off."""
    bench = open_case(case)
    limits = [
        {"temperature": 0.0},
        {"temperature": 1e-6},
        {"temperature": 1.0, "top_p": 0.0},
        {"temperature": 1.0, "top_k": 1},
    ]
    for i, params in enumerate(limits):
        bench.submit(str(i), PROMPT, bench.plan(6), sampling=SamplingParams(**params), ignore_eos=True)
    for name, top_k in (("off", 0), ("huge", 10**6)):
        sampling = SamplingParams(temperature=1.5, seed=5, top_k=top_k)
        bench.submit(name, PROMPT, bench.plan(6), sampling=sampling, ignore_eos=True)
    bench.run()
    for i in range(len(limits)):
        assert [bench.outcome(str(i))] == solo(case, PROMPT, 6, ignore_eos=True), limits[i]
    assert bench.outcome("off") == bench.outcome("huge") != bench.outcome("0")


def test_bad_ids_are_refused_beside_a_healthy_request(case: Any, open_case: OpenCase, solo: Solo) -> None:
    """Bias, stop ids and prompts out of the vocabulary, and adapters, are errors of their own request."""
    bench = open_case(case)
    size = bench.runner.spec.vocab_size
    bench.submit("healthy", PROMPT, bench.plan(9), ignore_eos=True)
    bench.step()
    for bad in (size, size + 1, -1):
        for fields in (
            {"sampling": SamplingParams(logit_bias={bad: 1.0})},
            {"stop_token_ids": (bad,)},
            {"prompt": [1, bad]},
        ):
            with pytest.raises(InvalidValueError, match=str(bad)):
                bench.submit("bad", fields.pop("prompt", PROMPT), bench.plan(4), **fields)
        bench.step()
    with pytest.raises(UnknownOptionError, match="adapter"):
        bench.submit("bad", PROMPT, bench.plan(4), adapter="a")
    bench.run()
    assert [bench.outcome("healthy")] == solo(case, PROMPT, 9, ignore_eos=True)


def test_a_prompt_beyond_the_cache(case: Any, open_case: OpenCase, solo: Solo) -> None:
    """A prompt of more blocks than there are is refused at once, and a small one runs."""
    bench = open_case(case)
    with pytest.raises(PromptTooLongError, match="at most"):
        bench.submit("big", [65] * (4 * bench.runner.n_blocks + 2), bench.plan(1))
    assert not bench.engine.has_work
    bench.submit("small", PROMPT, bench.plan(5), ignore_eos=True)
    bench.run()
    assert [bench.outcome("small")] == solo(case, PROMPT, 5, ignore_eos=True)


@pytest.mark.parametrize("n_prompt", [4, 8])
def test_a_prompt_of_full_blocks(case: Any, open_case: OpenCase, solo: Solo, n_prompt: int) -> None:
    """The last token of a prompt that fills its blocks is never served from the cache."""
    bench = open_case(case)
    prompt = list(range(65, 65 + n_prompt))
    for name in ("first", "second"):
        bench.submit(name, prompt, bench.plan(4), ignore_eos=True)
        bench.run()
        assert [bench.outcome(name)] == solo(case, prompt, 4, ignore_eos=True)
    cached = bench.out.finish("second").usage.cached_tokens
    assert cached == (n_prompt - 4 if case.cached else 0)


def test_a_pool_that_one_request_fills(crowded_case: Any, open_case: OpenCase, solo: Solo) -> None:
    """Requests of which each needs all blocks take turns: they are preempted or wait, and are as alone."""
    bench = open_case(crowded_case)
    n_tokens = 4 * bench.runner.n_blocks + 1 - len(PROMPT)
    for name in ("one", "two"):
        bench.submit(name, PROMPT, bench.plan(n_tokens), ignore_eos=True)
    out = bench.run()
    assert not out.errors
    for name in ("one", "two"):
        assert [bench.outcome(name)] == solo(crowded_case, PROMPT, n_tokens, ignore_eos=True)
