from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline_engine.errors import BackendError, DeadlineExpiredError, InvalidValueError, PromptTooLongError

MakeBench = Callable[..., Any]


@pytest.fixture
def logprob() -> Callable[..., float]:
    """The log probability of an option after a prompt, found without the engine."""
    from hashlib import shake_128

    def find(prompt: list[int], option: tuple[int, ...]) -> float:
        total, ids = 0.0, list(prompt)
        for token in option:
            digest = shake_128(" ".join(map(str, ids)).encode()).digest(64)
            logits = torch.tensor(list(digest), dtype=torch.float32) / 32
            logits[63] = -4.0
            total += float(logits.log_softmax(0)[token])
            ids.append(token)
        return total

    return find


OPTIONS = ("A", "ABC", "ABD", "HELLO THERE", "B")


@pytest.mark.parametrize("n_prompt", [1, 4, 6, 8])
@pytest.mark.parametrize("chunk", [2, 256])
def test_scores(make_bench: MakeBench, logprob: Callable[..., float], n_prompt: int, chunk: int) -> None:
    """Each option's score is the sum of its tokens' log probabilities after the prompt."""
    bench = make_bench(max_prefill_tokens_per_step=chunk)
    prompt = list(range(n_prompt))
    bench.score("s", prompt, OPTIONS)
    result = bench.run().scores["s"]
    assert [score.text for score in result.scores] == list(OPTIONS)
    for score in result.scores:
        ids = bench.tokenizer.encode(score.text)
        assert score.n_tokens == len(ids)
        assert score.logprob == pytest.approx(logprob(prompt, ids), abs=1e-4)
    assert result.usage.prompt_tokens == n_prompt + sum(map(len, OPTIONS))
    assert result.usage.completion_tokens == 0
    assert bench.free == 32


def test_the_prompt_runs_once(make_bench: MakeBench) -> None:
    """One pass for the prompt, one for all the options' tokens that need one."""
    bench = make_bench()
    bench.score("s", list(range(10)), OPTIONS)
    result = bench.run().scores["s"]
    assert [sum(len(part.token_ids) for part in slices) for _, slices in bench.runner.passes] == [10, 14]
    assert [step.prefill_tokens for step in result.timeline.steps] == [10, 14]
    bench.score("t", list(range(10)), ("A", "B"))
    bench.run()
    assert len(bench.runner.passes) == 3
    assert bench.out.scores["t"].usage.cached_tokens == 8


def test_batch_caps_count_a_scoring_once(make_bench: MakeBench) -> None:
    """The branches of one scoring share a pass even where no other sequence may share the step."""
    bench = make_bench()
    bench.score("s", [1, 2, 3], OPTIONS, bench.plan(batch_cap=1))
    bench.run()
    assert len(bench.runner.passes) == 2


def test_a_long_text_is_scored_in_chunks(make_bench: MakeBench, logprob: Callable[..., float]) -> None:
    """A text of many chunks after a prompt of one token is scored as a whole."""
    bench = make_bench(n_blocks=200, max_prefill_tokens_per_step=64)
    text = "THE QUICK BROWN FOX " * 25
    bench.score("s", [0], (text,))
    (score,) = bench.run().scores["s"].scores
    assert score.n_tokens == 500
    assert score.logprob == pytest.approx(logprob([0], bench.tokenizer.encode(text)), abs=1e-2)


def test_scoring_in_a_crowded_pool(make_bench: MakeBench, logprob: Callable[..., float]) -> None:
    """Branches without room wait or are computed again, beside streams, and score the same."""
    bench = make_bench(n_blocks=7)
    prompt = list(range(10))
    bench.submit("stream", [5, 6], bench.plan(12))
    bench.step()
    bench.score("s", prompt, ("HELLO THERE", "ANOTHER ONE", "A THIRD"))
    bench.run()
    assert len(bench.out.ids("stream")) == 12
    for score in bench.out.scores["s"].scores:
        expected = logprob(prompt, bench.tokenizer.encode(score.text))
        assert score.logprob == pytest.approx(expected, abs=1e-4)
    assert bench.free == 7


def test_scoring_refusals(make_bench: MakeBench) -> None:
    """Options that cannot fit or be run, and expired deadlines, are refused at submission."""
    bench = make_bench(n_blocks=2)
    with pytest.raises(PromptTooLongError):
        bench.score("s", [1, 2], ("ABCDEFGH",))
    with pytest.raises(InvalidValueError, match="options"):
        bench.score("s", [1, 2], ("!",))
    with pytest.raises(InvalidValueError, match="prompt"):
        bench.score("s", [], ("A",))
    with pytest.raises(DeadlineExpiredError):
        bench.score("s", [1], ("A",), bench.plan(deadline_at_s=0.0))
    assert not bench.engine.has_work


def test_aborted_and_failed_scorings(make_bench: MakeBench) -> None:
    """An aborted scoring gives nothing; one whose logits are not a number gives an error."""
    bench = make_bench()
    bench.score("gone", [1, 2, 3], OPTIONS)
    bench.step()
    bench.engine.abort("gone")
    bench.run()
    bench.runner.change_logits = lambda part, logits: logits.fill_(torch.nan)
    bench.score("bad", [1, 2, 3], OPTIONS)
    out = bench.run()
    assert not out.scores
    assert isinstance(out.errors["bad"], BackendError)
    assert bench.free == 32
