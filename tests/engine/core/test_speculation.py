"""Speculation in the step loop: the tokens are those of a run without it, whatever is drafted."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from paceline_engine.chunk import FinishReason
from paceline_engine.errors import BackendError, UnknownOptionError
from paceline_engine.mode import Drafter, Speculation, Variant
from paceline_engine.request import SamplingParams

MakeBench = Callable[..., Any]
GreedyIds = Callable[[Sequence[int], int], list[int]]

SELF = Speculation(drafter=Drafter.SELF, max_draft_tokens=5, draft_variant=Variant.INT4)
NGRAM = Speculation(drafter=Drafter.NGRAM, max_draft_tokens=5)
EVERY = {"self": SELF, "ngram": NGRAM}
PROMPT = [1, 2, 3, 4, 5, 6, 7]


@pytest.fixture
def make_drafting(make_bench: MakeBench) -> MakeBench:
    """A bench that always drafts as much as it may, whose int4 drafts are wrong now and then."""

    def make(*args: Any, wrong_every: int = 4, **config: Any) -> Any:
        bench = make_bench(*args, **{"adapt_drafts": False} | config)
        runner, forward = bench.runner, bench.runner.forward

        def forward_with_errors(slices: Any, variant: Variant, *, vocabulary: Any = None) -> torch.Tensor:
            logits: torch.Tensor = forward(slices, variant, vocabulary=vocabulary)
            if variant is Variant.INT4:
                for row, part in enumerate(slices):
                    if part.position % wrong_every == 0:
                        logits[row] = logits[row].roll(1)
            return logits

        runner.forward = forward_with_errors
        return bench

    return make


def looping(runner: Any) -> None:
    """Let the model mostly repeat its token of four places before, so that n-grams are often right."""

    def change(seen: Sequence[str], logits: torch.Tensor) -> None:
        if len(seen) >= 4 and (len(seen) * 7) % 11:
            logits[int(seen[-4])] += 100

    runner.change_row = change


def finish_of(bench: Any, name: str = "a") -> Any:
    return bench.out.finish(name)


@pytest.mark.parametrize("drafter", list(EVERY))
@pytest.mark.parametrize("n_prompt", [1, 4, 7])
def test_greedy_output_is_unchanged(
    make_drafting: MakeBench, greedy_ids: GreedyIds, drafter: str, n_prompt: int
) -> None:
    """Greedy tokens, the cap and the block count are those of a run without drafts."""
    bench = make_drafting()
    bench.submit("a", PROMPT[:n_prompt], bench.plan(23, speculation=EVERY[drafter]))
    bench.run()
    assert bench.out.ids("a") == greedy_ids(PROMPT[:n_prompt], 23)
    assert bench.free == 32
    assert finish_of(bench).usage.completion_tokens == 23


def test_timeline_counts_drafts(make_drafting: MakeBench) -> None:
    """The timeline shows each draft pass before the pass that verifies it, and how drafts fared."""
    bench = make_drafting()
    bench.submit("a", PROMPT, bench.plan(23, speculation=SELF))
    bench.run()
    timeline = finish_of(bench).timeline
    drafting = [step for step in timeline.steps if step.drafting]
    assert {step.variant for step in drafting} == {Variant.INT4}
    assert {step.variant for step in timeline.steps if not step.drafting} == {Variant.BF16}
    assert timeline.drafted_tokens == sum(step.decode_tokens for step in drafting)
    verified = [step.decode_tokens for step in timeline.steps if not step.drafting and step.decode_tokens]
    assert sum(verified) == timeline.drafted_tokens + len(verified)
    assert 0 < timeline.accepted_tokens < timeline.drafted_tokens
    # Each verification gives one token beside the accepted ones, and the prefill gives the first.
    assert timeline.accepted_tokens + len(verified) + 1 == 23
    assert max(token.n_tokens for token in timeline.tokens) > 1
    assert list(timeline.steps) == sorted(timeline.steps, key=lambda step: step.started_at_s)
    for step, after in zip(timeline.steps, timeline.steps[1:], strict=False):
        assert step.drafting <= (after.drafting or after.decode_tokens > 1)


SAMPLINGS = {
    "temperature": SamplingParams(temperature=1.2, seed=3),
    "top": SamplingParams(temperature=0.9, top_p=0.8, top_k=20, min_p=0.01, seed=4),
    "penalties": SamplingParams(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3),
    "bias": SamplingParams(temperature=1.0, logit_bias={5: 3.0, 9: -50.0}, seed=5),
    "min_tokens": SamplingParams(min_tokens=9, logit_bias={63: 100.0}),
    "logprobs": SamplingParams(logprobs=3, temperature=0.7, seed=6),
}


@pytest.mark.parametrize("drafter", list(EVERY))
@pytest.mark.parametrize("name", list(SAMPLINGS))
def test_every_rule_draws_the_same(make_drafting: MakeBench, drafter: str, name: str) -> None:
    """Tokens, text, log probabilities and endings are those without drafts, for every sampling rule."""
    found = []
    for speculation in (None, EVERY[drafter]):
        bench = make_drafting(n_blocks=80)
        looping(bench.runner)
        plan = bench.plan(30, speculation=speculation)
        bench.submit("a", PROMPT, plan, sampling=SAMPLINGS[name], n=3)
        bench.run()
        assert not bench.out.errors
        drafted = [bench.out.finish("a", index).timeline.drafted_tokens for index in range(3)]
        assert (sum(drafted) > 0) == (speculation is not None)
        assert bench.free == 80
        found.append([_outcome(bench, index) for index in range(3)])
    assert found[0] == found[1]


def _outcome(bench: Any, index: int) -> tuple[Any, ...]:
    chunks = [chunk for chunk in bench.out.chunks["a"] if chunk.index == index]
    finish = bench.out.finish("a", index)
    logprobs = [one for chunk in chunks for one in chunk.logprobs or ()]
    return bench.out.ids("a", index), bench.out.text("a", index), logprobs, finish.reason, finish.stop_text


@pytest.mark.parametrize("drafter", list(EVERY))
def test_stop_inside_accepted_drafts(make_drafting: MakeBench, drafter: str) -> None:
    """A stop string that drafts complete drops the tokens and text after it, and the chunk ends there."""
    plain = make_drafting()
    looping(plain.runner)
    plain.submit("a", PROMPT, plain.plan(30))
    plain.run()
    text = plain.out.text("a")
    n_inside = 0
    for end in range(4, 24):
        bench = make_drafting(wrong_every=50)
        looping(bench.runner)
        stop = text[end - 3 : end]
        bench.submit("a", PROMPT, bench.plan(30, speculation=EVERY[drafter]), stop=(stop,))
        bench.run()
        finish = finish_of(bench)
        n_tokens = text.index(stop) + 3
        assert (finish.reason, finish.stop_text) == (FinishReason.STOP, stop)
        assert bench.out.text("a") == text[: n_tokens - 3]
        assert bench.out.ids("a") == plain.out.ids("a")[:n_tokens]
        assert finish.usage.completion_tokens == n_tokens
        assert finish.timeline.accepted_tokens < n_tokens
        assert bench.free == 32
        n_inside += bench.runner.passes[-1][1][0].position + 1 - len(PROMPT) < n_tokens - 1
    assert n_inside > 0


@pytest.mark.parametrize("drafter", list(EVERY))
def test_rejected_drafts_never_reach_the_prefix_cache(make_drafting: MakeBench, drafter: str) -> None:
    """What is cached after a run with wrong drafts is the target's own KV, and serves the target."""
    bench = make_drafting(wrong_every=3)
    bench.runner.variants_differ = True  # every KV entry names who wrote it, and the logits depend on that
    alone = make_drafting()
    alone.runner.variants_differ = True
    for one in (bench, alone):
        speculation = EVERY[drafter] if one is bench else None
        one.submit("a", PROMPT, one.plan(21, speculation=speculation))
        one.run()
    ids = [*PROMPT, *bench.out.ids("a")]
    assert bench.out.ids("a") == alone.out.ids("a")
    cached = bench.engine.snapshot(ids).cached_tokens
    assert cached[Variant.BF16] == (len(ids) - 1) // 4 * 4
    for one in (bench, alone):
        one.submit("b", ids, one.plan(8))
        one.run()
    assert bench.out.ids("b") == alone.out.ids("b")
    assert finish_of(bench, "b").usage.cached_tokens == cached[Variant.BF16]


def test_streams_share_passes(make_drafting: MakeBench, greedy_ids: GreedyIds) -> None:
    """Drafts of several streams are made in one pass, and verified in one with those that do not draft."""
    bench = make_drafting(n_blocks=60, wrong_every=50)
    for name in "abc":
        speculation = None if name == "c" else SELF
        bench.submit(name, [ord(name) - 90, 3, 9], bench.plan(20, speculation=speculation))
    bench.step(2)
    bench.submit("d", [40] * 13, bench.plan(1))
    bench.runner.passes.clear()
    bench.step()
    *drafting, (variant, verifying) = bench.runner.passes
    assert [(one, len(slices)) for one, slices in drafting] == [(Variant.INT4, 2)] * 5
    assert variant is Variant.BF16
    assert sorted(len(part.token_ids) for part in verifying) == [1, 6, 6, 13]
    bench.run()
    for name in "abc":
        assert bench.out.ids(name) == greedy_ids([ord(name) - 90, 3, 9], 20)


def test_drafts_take_no_block_from_others(make_drafting: MakeBench, greedy_ids: GreedyIds) -> None:
    """In a pool that the tokens fill exactly, nobody is preempted for drafts, and every block comes back."""
    bench = make_drafting(n_blocks=8)
    for name in "ab":
        bench.submit(name, [ord(name) - 90] * 4, bench.plan(13, prefix_cache=False, speculation=SELF))
    bench.run()
    for name in "ab":
        assert bench.out.ids(name) == greedy_ids([ord(name) - 90] * 4, 13)
        assert not finish_of(bench, name).timeline.events
    assert bench.free == 8


def test_blocks_of_rejected_drafts_are_given_back(make_drafting: MakeBench) -> None:
    """Between steps a stream holds the blocks of its own tokens only."""
    bench = make_drafting(wrong_every=1)
    bench.submit("a", PROMPT, bench.plan(20, prefix_cache=False, speculation=SELF))
    while bench.engine.has_work:
        bench.step()
        n_tokens = len(PROMPT) + len(bench.out.ids("a"))
        if bench.engine.has_work:
            assert 32 - bench.free == -(-n_tokens // 4) or 32 - bench.free == -(-(n_tokens - 1) // 4)
    assert finish_of(bench).timeline.accepted_tokens == 0


@pytest.mark.parametrize("in_pass", range(7))
def test_abort_while_drafting(make_drafting: MakeBench, greedy_ids: GreedyIds, in_pass: int) -> None:
    """An abort in any pass of a round frees all blocks, and others go on as if alone."""
    bench = make_drafting(n_blocks=40)
    bench.submit("a", PROMPT, bench.plan(30, speculation=SELF))
    bench.submit("b", [9, 9], bench.plan(15, speculation=SELF))
    bench.step(2)
    n_passes = 0

    def abort(slices: object) -> None:
        nonlocal n_passes
        if n_passes == in_pass:
            bench.engine.abort("a")
        n_passes += 1

    bench.runner.before_pass = abort
    bench.run()
    assert bench.out.finish("a").reason is FinishReason.CANCELLED
    assert bench.out.ids("a") == greedy_ids(PROMPT, 30)[: len(bench.out.ids("a"))]
    assert bench.out.ids("b") == greedy_ids([9, 9], 15)
    assert bench.free == 40


def test_change_of_variant_between_rounds(make_drafting: MakeBench, greedy_ids: GreedyIds) -> None:
    """A stream moved to its own draft variant stops drafting with it, and drafts again when moved back."""
    bench = make_drafting(wrong_every=10_000)
    bench.submit("a", PROMPT, bench.plan(40, speculation=SELF))
    bench.step(2)
    bench.engine.change_variant("a", Variant.INT4)
    bench.step(3)
    changed = len(bench.out.ids("a"))
    bench.engine.change_variant("a", Variant.BF16)
    bench.run()
    assert bench.out.ids("a") == greedy_ids(PROMPT, 40)
    steps = finish_of(bench).timeline.steps
    assert any(step.variant is Variant.INT4 and not step.drafting for step in steps)
    assert changed < 40
    assert steps[-1].variant is Variant.BF16
    assert steps[-1].decode_tokens > 1


def test_a_failing_draft_pass_costs_only_the_drafts(make_drafting: MakeBench, greedy_ids: GreedyIds) -> None:
    """Where the draft variant fails, the stream says so in its timeline and goes on without it."""
    bench = make_drafting()
    forward = bench.runner.forward

    def failing(slices: Any, variant: Variant, **options: Any) -> Any:
        if variant is Variant.INT4:
            raise RuntimeError("no memory")
        return forward(slices, variant, **options)

    bench.runner.forward = failing
    bench.submit("a", PROMPT, bench.plan(12, speculation=SELF))
    bench.run()
    assert bench.out.ids("a") == greedy_ids(PROMPT, 12)
    (event,) = finish_of(bench).timeline.events
    assert event.name == "drafting_failed"
    assert "no memory" in event.attributes["error"]


@pytest.mark.parametrize("drafter", list(EVERY))
def test_undrawable_after_accepted_drafts(make_drafting: MakeBench, drafter: str) -> None:
    """Tokens accepted before a position that cannot be drawn are sent, then the request fails as without."""

    def break_down(seen: Sequence[str], logits: torch.Tensor) -> None:
        if len(seen) >= 16:
            logits.fill_(torch.nan)

    texts = []
    for speculation in (None, EVERY[drafter]):
        bench = make_drafting(wrong_every=50)
        bench.runner.change_row = break_down
        bench.submit("a", PROMPT, bench.plan(30, speculation=speculation))
        bench.run()
        error = bench.out.errors["a"]
        assert isinstance(error, BackendError)
        assert error.phase == "decode"
        texts.append((error.partial_text, bench.out.text("a")))
        assert bench.free == 32
    assert texts[0] == texts[1]


def test_a_draft_variant_that_is_not_loaded(make_drafting: MakeBench) -> None:
    """A plan that drafts with a variant that is not loaded is refused, naming those that are."""
    bench = make_drafting()
    speculation = Speculation(drafter=Drafter.SELF, max_draft_tokens=2, draft_variant=Variant.INT8)
    with pytest.raises(UnknownOptionError, match="bf16, int4"):
        bench.submit("a", PROMPT, bench.plan(8, speculation=speculation))


@pytest.mark.parametrize("seed", range(4))
def test_soak(make_drafting: MakeBench, greedy_ids: GreedyIds, seed: int) -> None:
    """Random streams, aborts and changes of variant in a small pool: right tokens, and no block is lost."""
    rng = random.Random(seed)
    bench = make_drafting(n_blocks=17, wrong_every=rng.randint(2, 6), max_prefill_tokens_per_step=5)
    expected: dict[str, list[int]] = {}
    for i in range(24):
        name, prompt = str(i), [rng.randrange(60) for _ in range(rng.randint(1, 14))]
        n = rng.randint(1, 18)
        plan = bench.plan(n, speculation=rng.choice([None, SELF, NGRAM]), prefix_cache=rng.random() < 0.7)
        bench.submit(name, prompt, plan)
        expected[name] = greedy_ids(prompt, n)
        if rng.random() < 0.2:
            bench.engine.abort(str(rng.randrange(i + 1)))
        bench.step(rng.randint(0, 4))
    out = bench.run()
    assert not out.errors
    for name, ids in expected.items():
        cancelled = out.finish(name).reason is FinishReason.CANCELLED
        assert out.ids(name) == (ids[: len(out.ids(name))] if cancelled else ids), name
    assert bench.free == 17


def accepted_in(bench: Any, name: str, prompt: Sequence[int], **fields: Any) -> int:
    bench.submit(name, prompt, bench.plan(16, speculation=NGRAM), **fields)
    bench.run()
    return int(finish_of(bench, name).timeline.accepted_tokens)


def test_a_session_drafts_what_was_said_in_it_and_nobody_else_s_words(
    make_drafting: MakeBench, greedy_ids: GreedyIds
) -> None:
    """Text of an earlier request comes from its own session and salt alone; the tokens stay the same."""
    bench = make_drafting()
    expected = greedy_ids(PROMPT, 16)
    for name, fields in {
        "first": {"session": "s"},
        "no session": {},
        "another": {"session": "t"},
        "another tenant": {"session": "s", "salt": "t"},
    }.items():
        assert accepted_in(bench, name, PROMPT, **fields) == 0, name
    assert accepted_in(bench, "again", PROMPT, session="s") >= 10
    bench.engine.end_session("s", salt="t")
    assert accepted_in(bench, "still", PROMPT, session="s") >= 10
    bench.engine.end_session("s")
    assert accepted_in(bench, "ended", PROMPT, session="s") == 0
    assert all(bench.out.ids(name) == expected for name in bench.out.chunks)


def test_a_request_that_shares_nothing_leaves_nothing_in_its_session(make_drafting: MakeBench) -> None:
    """Without the prefix cache, as in calibration, neither keeps nor drafts a session's words."""
    bench = make_drafting()
    for name in ("a", "b"):
        plan = bench.plan(16, speculation=NGRAM, prefix_cache=False)
        bench.submit(name, PROMPT, plan, session="s")
        bench.run()
        assert finish_of(bench, name).timeline.accepted_tokens == 0
    assert len(bench.engine._speculator.sessions) == 0


def test_a_cancelled_answer_counts_as_far_as_it_came(make_drafting: MakeBench) -> None:
    """What was said before the caller left is drafted too."""
    bench = make_drafting()
    bench.submit("a", PROMPT, bench.plan(16, speculation=NGRAM), session="s")
    bench.step(9)
    bench.engine.abort("a")
    bench.run()
    n_said = len(bench.out.ids("a"))
    assert n_said < 16
    assert 0 < accepted_in(bench, "b", PROMPT, session="s") <= n_said
