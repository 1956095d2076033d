from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from paceline_engine.chunk import FinishReason
from paceline_engine.errors import (
    BackendError,
    DeadlineExpiredError,
    InvalidValueError,
    PromptTooLongError,
    UnknownOptionError,
)
from paceline_engine.mode import Drafter, Speculation, Variant
from paceline_engine.request import SamplingParams

MakeBench = Callable[..., Any]
GreedyIds = Callable[[Sequence[int], int], list[int]]


@pytest.mark.parametrize("n_prompt", [1, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("chunk", [1, 3, 256])
def test_greedy_output(make_bench: MakeBench, greedy_ids: GreedyIds, n_prompt: int, chunk: int) -> None:
    """Any prompt length, in chunks of any size, gives what the model gives without an engine."""
    prompt = list(range(n_prompt))
    bench = make_bench(max_prefill_tokens_per_step=chunk)
    bench.submit("a", prompt)
    out = bench.run()
    assert out.ids("a") == greedy_ids(prompt, 8)
    assert out.text("a") == bench.tokenizer.decode(out.ids("a"))
    finish = out.finish("a")
    assert finish.reason is FinishReason.LENGTH
    assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (n_prompt, 8)
    assert bench.free == 32


def test_batched_rows_equal_solo_runs(make_bench: MakeBench, greedy_ids: GreedyIds) -> None:
    """Unequal prompts that run together each get their own output."""
    prompts = {"a": [1, 2, 3], "b": list(range(20)), "c": [9] * 8, "d": [1, 2, 3]}
    bench = make_bench(max_prefill_tokens_per_step=7)
    for name, prompt in prompts.items():
        bench.submit(name, prompt, bench.plan(12))
    out = bench.run()
    for name, prompt in prompts.items():
        assert out.ids(name) == greedy_ids(prompt, 12), name


def test_preemption_changes_no_output(make_bench: MakeBench, greedy_ids: GreedyIds) -> None:
    """Sequences that outgrow the pool take turns, and each output is that of a run alone."""
    bench = make_bench(n_blocks=9)
    for i in range(4):
        bench.submit(str(i), [i, 7, 7], bench.plan(25, prefix_cache=i % 2 == 0))
    out = bench.run()
    for i in range(4):
        assert out.ids(str(i)) == greedy_ids([i, 7, 7], 25)
    events = [event.name for i in range(4) for event in out.finish(str(i)).timeline.events]
    assert "preempted" in events
    assert bench.free == 9


def test_preemption_keeps_sampled_streams(make_bench: MakeBench) -> None:
    """A seeded stream draws the same tokens whether or not it was preempted."""
    sampling = SamplingParams(temperature=1.3, seed=5)
    alone = make_bench(n_blocks=64)
    crowded = make_bench(n_blocks=9)
    for i in range(4):
        crowded.submit(str(i), [i, 1], crowded.plan(25), sampling=sampling)
    crowded.run()
    assert any(crowded.out.finish(str(i)).timeline.events for i in range(4))
    for i in range(4):
        alone.submit(str(i), [i, 1], alone.plan(25), sampling=sampling)
        alone.run()
        assert alone.out.ids(str(i)) == crowded.out.ids(str(i))


def test_choices_share_one_prefill(make_bench: MakeBench) -> None:
    """The prompt of n choices runs once; their streams differ, and each equals its run in another batch."""
    sampling = SamplingParams(temperature=1.0, seed=3)
    bench = make_bench()
    bench.submit("a", [1, 2, 3, 4, 5, 6], bench.plan(10), sampling=sampling, n=3)
    bench.run()
    prompt_tokens = sum(
        len(part.token_ids) for _, slices in bench.runner.passes for part in slices if part.position < 6
    )
    assert prompt_tokens == 6
    streams = [bench.out.ids("a", index) for index in range(3)]
    assert len({tuple(ids) for ids in streams}) == 3
    assert bench.free == 32
    beside = make_bench(n_blocks=40, max_prefill_tokens_per_step=2)
    beside.submit("z", [8] * 9, beside.plan(20), sampling=SamplingParams(temperature=2.0))
    beside.submit("a", [1, 2, 3, 4, 5, 6], beside.plan(10, batch_cap=2), sampling=sampling, n=3)
    beside.run()
    assert [beside.out.ids("a", index) for index in range(3)] == streams


def test_choices_with_too_few_blocks_are_computed_again(make_bench: MakeBench) -> None:
    """Choices that find no room after the prefill wait, and still give their own output."""
    sampling = SamplingParams(temperature=1.0, seed=3)
    roomy, narrow = make_bench(n_blocks=64), make_bench(n_blocks=5)
    for bench in (roomy, narrow):
        bench.submit("a", list(range(10)), bench.plan(8), sampling=sampling, n=4)
        bench.run()
    assert [narrow.out.ids("a", i) for i in range(4)] == [roomy.out.ids("a", i) for i in range(4)]
    assert narrow.free == 5


def test_seeds(make_bench: MakeBench) -> None:
    """A seeded request draws the same beside anything; two unseeded copies differ."""
    bench = make_bench(n_blocks=64)
    seeded = SamplingParams(temperature=1.5, seed=42)
    bench.submit("alone", [1, 2], bench.plan(12), sampling=seeded)
    bench.run()
    bench.submit("u", [1, 2], bench.plan(12), sampling=SamplingParams(temperature=1.5))
    bench.submit("again", [1, 2], bench.plan(12), sampling=seeded)
    bench.submit("v", [1, 2], bench.plan(12), sampling=SamplingParams(temperature=1.5))
    bench.submit("other", [1, 2], bench.plan(12), sampling=SamplingParams(temperature=1.5, seed=7))
    out = bench.run()
    assert out.ids("again") == out.ids("alone")
    assert len({tuple(out.ids(name)) for name in ("alone", "u", "v", "other")}) == 4


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_abort_frees_everything(make_bench: MakeBench, n: int, after: int) -> None:
    """After an abort nothing of the request runs, its blocks are free, and each choice ends once."""
    bench = make_bench(n_blocks=2100, max_prefill_tokens_per_step=3)
    bench.submit("long", list(range(7)), bench.plan(4000), n=n)
    bench.step(after)
    bench.engine.abort("long")
    bench.engine.abort("long")
    bench.engine.abort("never seen")
    ran = len(bench.runner.passes)
    bench.step()
    assert len(bench.runner.passes) == ran
    assert bench.free == 2100
    assert not bench.engine.has_work
    for index in range(n):
        finish = bench.out.finish("long", index)
        assert finish.reason is FinishReason.CANCELLED
        assert finish.usage.completion_tokens == len(bench.out.ids("long", index))


def test_abort_during_a_pass(make_bench: MakeBench, greedy_ids: GreedyIds) -> None:
    """Blocks of a request aborted while its pass runs are given back when the pass has landed."""
    bench = make_bench()
    bench.submit("a", [1, 2, 3])
    bench.submit("b", [4, 5, 6])
    bench.step(2)
    bench.runner.before_pass = lambda slices: bench.engine.abort("a")
    bench.step()
    out = bench.run()
    assert out.finish("a").reason is FinishReason.CANCELLED
    assert out.ids("b") == greedy_ids([4, 5, 6], 8)
    assert bench.free == 32


def test_snapshot_does_not_wait_for_a_pass(make_bench: MakeBench) -> None:
    """While a pass runs, other threads look, submit and abort."""
    bench = make_bench()
    done = threading.Event()

    def look() -> None:
        bench.engine.snapshot([1, 2, 3])
        bench.submit("b", [1])
        bench.engine.abort("b")
        done.set()

    def in_pass(slices: object) -> None:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join(20)

    bench.submit("a", [1, 2, 3], bench.plan(1))
    bench.runner.before_pass = in_pass
    bench.step()
    assert done.is_set()


def test_capacity(make_bench: MakeBench, greedy_ids: GreedyIds) -> None:
    """A prompt that can never fit is refused at once with the numbers, and a small one runs."""
    bench = make_bench(n_blocks=8)
    with pytest.raises(PromptTooLongError) as caught:
        bench.submit("big", [1] * 40)
    assert "33" in str(caught.value)
    assert "40" in str(caught.value)
    bench.submit("small", [1, 2])
    assert bench.run().ids("small") == greedy_ids([1, 2], 8)


def test_exact_capacity_runs(make_bench: MakeBench, greedy_ids: GreedyIds) -> None:
    """Prompt and cap that fill the whole pool run: the last token's KV is never needed."""
    bench = make_bench(n_blocks=8)
    bench.submit("full", [1] * 25, bench.plan(8))
    assert bench.run().ids("full") == greedy_ids([1] * 25, 8)
    with pytest.raises(PromptTooLongError):
        bench.submit("over", [1] * 26, bench.plan(8))


def test_context_limit(make_bench: MakeBench) -> None:
    """The model's context limits prompt and cap together, and the error says so."""
    bench = make_bench(context_tokens=16)
    with pytest.raises(PromptTooLongError, match="context"):
        bench.submit("a", [1] * 9, bench.plan(8))
    bench.submit("b", [1] * 8, bench.plan(8))
    assert len(bench.run().ids("b")) == 8


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": SamplingParams(logit_bias={64: 1.0})},
        {"sampling": SamplingParams(logit_bias={-1: 1.0})},
        {"stop_token_ids": (64,)},
        {"stop_token_ids": (-1,)},
        {"sampling": SamplingParams(logit_bias={1.5: 1.0})},  # type: ignore[dict-item]  # pyright: ignore
        {"stop_token_ids": (1.5,)},
        {"stop_token_ids": (True,)},
        {"stop": "AB"},
        {"stop": (b"A",)},
        {"n": 2.0},
        {"salt": ["a"]},
        {"salt": 1},
        {"session": ["a"]},
        {"adapter": "a"},
        {"adapter": ["a"]},
    ],
)
def test_a_bad_request_alone_is_refused(
    make_bench: MakeBench, greedy_ids: GreedyIds, fields: dict[str, Any]
) -> None:
    """Ids beyond the vocabulary, and what is no id or text, are refused, and a healthy neighbour finishes."""
    bench = make_bench()
    bench.submit("good", [1, 2])
    bench.step()
    with pytest.raises(InvalidValueError):
        bench.submit("bad", [1, 2], **fields)
    out = bench.run()
    assert out.ids("good") == greedy_ids([1, 2], 8)
    assert not out.errors


@pytest.mark.parametrize("count", [1.5, True, "3", float("nan")])
def test_counts_of_a_plan_are_whole(make_bench: MakeBench, count: Any) -> None:
    """Caps that are no whole numbers are refused where they are given, not in a step."""
    bench = make_bench()
    with pytest.raises(InvalidValueError, match="max_tokens"):
        bench.plan(count)
    with pytest.raises(InvalidValueError, match="batch_cap"):
        bench.plan(batch_cap=count)
    with pytest.raises(InvalidValueError, match="max_draft_tokens"):
        Speculation(drafter=Drafter.NGRAM, max_draft_tokens=count)


@pytest.mark.parametrize("prompt", [[], [64], [-1], [1.5]])
def test_bad_prompts_are_refused(make_bench: MakeBench, prompt: list[int]) -> None:
    """An empty prompt and ids that no embedding has are refused."""
    with pytest.raises(InvalidValueError, match="prompt"):
        make_bench().submit("a", prompt)


def test_unknown_variant_and_id_in_use(make_bench: MakeBench) -> None:
    """A variant that is not loaded and an id in flight are refused by name."""
    bench = make_bench()
    with pytest.raises(UnknownOptionError, match="fp8"):
        bench.submit("a", [1], bench.plan(variant=Variant.FP8))
    bench.submit("a", [1])
    with pytest.raises(InvalidValueError, match="id"):
        bench.submit("a", [1])
    with pytest.raises(UnknownOptionError, match="fp8"):
        bench.engine.change_variant("a", Variant.FP8)
    bench.engine.change_variant("gone", Variant.INT4)


def test_expired_deadlines(make_bench: MakeBench) -> None:
    """Work whose deadline has passed is refused at submission, or failed in the queue without running."""
    bench = make_bench(max_sequences=1)
    with pytest.raises(DeadlineExpiredError) as caught:
        bench.submit("late", [1], bench.plan(deadline_at_s=bench.clock.now_s - 1))
    assert caught.value.late_ms > 900
    bench.submit("first", [1], bench.plan(20))
    bench.step()
    bench.submit("queued", [2], bench.plan(deadline_at_s=bench.clock.now_s + 0.01))
    bench.clock.now_s += 1
    bench.step()
    assert isinstance(bench.out.errors["queued"], DeadlineExpiredError)
    bench.run()
    assert "queued" not in bench.out.chunks
    assert len(bench.out.ids("first")) == 20


def test_soft_and_hard_deadlines(make_bench: MakeBench) -> None:
    """At its deadline a started generation goes on, or ends with ``budget`` where the deadline is hard."""
    bench = make_bench()
    due = bench.clock.now_s + 0.5
    bench.submit("soft", [1], bench.plan(20, deadline_at_s=due))
    bench.submit("hard", [1], bench.plan(20, deadline_at_s=due, hard_deadline=True), stop=("~~~",))
    bench.step(5)
    bench.clock.now_s += 1
    out = bench.run()
    assert len(out.ids("soft")) == 20
    finish = out.finish("hard")
    assert finish.reason is FinishReason.BUDGET
    assert out.ids("hard") == out.ids("soft")[:5]
    assert out.text("hard") == out.text("soft")[:5]


def test_end_tokens_and_min_tokens(make_bench: MakeBench) -> None:
    """No end token comes before min_tokens, one right after; it counts in usage and has no text."""
    bench = make_bench()
    sampling = SamplingParams(min_tokens=4, logit_bias={63: 1000.0, 5: 1000.0})
    bench.submit("a", [1], bench.plan(20), sampling=sampling, stop_token_ids=(5,))
    out = bench.run()
    ids = out.ids("a")
    assert len(ids) == 5
    assert ids[4] in (5, 63)
    assert not {5, 63} & set(ids[:4])
    assert out.finish("a").reason is FinishReason.STOP
    assert out.finish("a").usage.completion_tokens == 5
    assert out.text("a") == bench.tokenizer.decode(ids[:4])


def test_ignore_eos(make_bench: MakeBench) -> None:
    """With ignore_eos the model's end token ends nothing, and stop ids still do."""
    bench = make_bench()
    bench.submit("a", [1], bench.plan(6), sampling=SamplingParams(logit_bias={63: 99.0}), ignore_eos=True)
    assert bench.run().ids("a") == [63] * 6
    assert bench.out.finish("a").reason is FinishReason.LENGTH


def test_stop_string_ends_the_stream(make_bench: MakeBench, greedy_ids: GreedyIds) -> None:
    """Nothing from the stop string on is sent; the chunks still carry every token."""
    bench = make_bench()
    ids = greedy_ids([1, 2, 3], 12)
    text = bench.tokenizer.decode(ids)
    bench.submit("a", [1, 2, 3], bench.plan(20), stop=("never", text[4:8]))
    out = bench.run()
    assert out.text("a") == text[:4]
    assert out.ids("a") == ids[:8]
    assert out.finish("a").reason is FinishReason.STOP
    assert out.finish("a").stop_text == text[4:8]
    assert [chunk.text for chunk in out.chunks["a"]][4:] == [""] * 4


def test_one_bad_row_fails_alone(make_bench: MakeBench, greedy_ids: GreedyIds) -> None:
    """A sequence whose logits are not a number ends with its text so far; its batch mates go on."""
    bench = make_bench()

    def spoil(part: Any, logits: torch.Tensor) -> None:
        if part.position == 5 and len(part.token_ids) == 1:
            logits[3] = torch.nan

    bench.runner.change_logits = spoil
    bench.submit("bad", [1, 2, 3], bench.plan(8))
    bench.submit("good", [1, 2, 3, 4, 5, 6, 7], bench.plan(8))
    out = bench.run()
    error = out.errors["bad"]
    assert isinstance(error, BackendError)
    assert error.phase == "decode"
    assert error.partial_text == bench.tokenizer.decode(greedy_ids([1, 2, 3], 3))
    assert out.ids("good") == greedy_ids([1, 2, 3, 4, 5, 6, 7], 8)
    assert bench.free == 32


def test_no_token_left_to_draw(make_bench: MakeBench) -> None:
    """Logits that are minus infinity everywhere fail that request with an error, not a token."""
    bench = make_bench()
    bench.runner.change_logits = lambda part, logits: logits.fill_(-torch.inf)
    bench.submit("a", [1], sampling=SamplingParams(temperature=1.0))
    assert isinstance(bench.run().errors["a"], BackendError)


def test_a_failing_pass_ends_its_own_requests(make_bench: MakeBench, greedy_ids: GreedyIds) -> None:
    """When the runner raises, the sequences of that pass fail with their text; other passes go on."""
    bench = make_bench()

    def fail(slices: Any) -> None:
        if bench.runner.passes[-1][0] is Variant.INT4 and slices[0].position > 4:
            raise RuntimeError("out of memory")

    bench.runner.before_pass = fail
    bench.submit("a", [1, 2, 3])
    bench.submit("b", [4, 5, 6], bench.plan(variant=Variant.INT4))
    out = bench.run()
    assert out.ids("a") == greedy_ids([1, 2, 3], 8)
    error = out.errors["b"]
    assert isinstance(error, BackendError)
    assert "out of memory" in str(error)
    assert error.partial_text == bench.tokenizer.decode(out.ids("b"))
    assert error.partial_text
    bench.runner.before_pass = lambda slices: None
    bench.submit("c", [4, 5, 6], bench.plan(variant=Variant.INT4))
    assert bench.run().ids("c") == greedy_ids([4, 5, 6], 8)
    assert bench.free == 32


def test_change_of_variant_between_tokens(make_bench: MakeBench) -> None:
    """A stream moves to another variant from the next token on, and its timeline says so."""
    bench = make_bench()
    bench.submit("a", [1, 2, 3], bench.plan(6))
    bench.step(3)
    bench.engine.change_variant("a", Variant.INT4)
    out = bench.run()
    assert [variant for variant, _ in bench.runner.passes] == [Variant.BF16] * 3 + [Variant.INT4] * 3
    (event,) = out.finish("a").timeline.events
    assert event.name == "variant_changed"
    assert event.attributes == {"from": "bf16", "to": "int4", "why": "the caller"}


def test_timeline(make_bench: MakeBench) -> None:
    """Every token has its time, and every step its size, shared by the sequences that ran in it."""
    bench = make_bench(max_prefill_tokens_per_step=4)
    bench.submit("a", [1, 2, 3, 4, 5, 6], bench.plan(3))
    bench.step(2)
    bench.submit("b", [7, 8], bench.plan(1))
    out = bench.run()
    timeline = out.finish("a").timeline
    assert [(step.prefill_tokens, step.decode_tokens) for step in timeline.steps] == [
        (4, 0),
        (2, 0),
        (2, 1),
        (0, 1),
    ]
    assert [step.context_tokens for step in timeline.steps] == [4, 6, 9, 8]
    assert [step.attended_pairs for step in timeline.steps] == [10, 11, 10, 8]
    assert timeline.n_tokens == 3
    assert timeline.started_at_s == timeline.steps[0].started_at_s
    assert timeline.finished_at_s == timeline.tokens[-1].made_at_s == out.chunks["a"][-1].made_at_s
    assert out.finish("b").timeline.steps == timeline.steps[2:3]


def test_long_timelines_stay_small(make_bench: MakeBench) -> None:
    """A long run keeps its first and its latest steps."""
    bench = make_bench(n_blocks=64, max_steps_recorded=8)
    bench.submit("a", [1], bench.plan(50))
    steps = bench.run().finish("a").timeline.steps
    assert [step.context_tokens for step in steps] == [1, 2, 3, 4, 47, 48, 49, 50]


def test_logprobs(make_bench: MakeBench) -> None:
    """Asked-for log probabilities come with each token, the drawn one equal to the best when greedy."""
    bench = make_bench()
    bench.submit("a", [1, 2], bench.plan(4), sampling=SamplingParams(logprobs=2))
    out = bench.run()
    logprobs = [entry for chunk in out.chunks["a"] for entry in chunk.logprobs or ()]
    assert [entry.token_id for entry in logprobs] == out.ids("a")
    for entry in logprobs:
        assert entry.logprob == pytest.approx(entry.top[0][2])
        assert len(entry.top) == 2
        assert entry.logprob < 0


def test_requests_from_many_threads(make_bench: MakeBench, greedy_ids: GreedyIds) -> None:
    """Threads submit, look, abort and change variants while steps run; what is not aborted is right."""
    bench = make_bench(n_blocks=12)
    faults: list[BaseException] = []

    def use(number: int) -> None:
        try:
            for i in range(12):
                name = f"{number}.{i}"
                bench.submit(name, [number, i, 3], bench.plan(6))
                bench.engine.snapshot([number, i, 3])
                bench.engine.change_variant(name, Variant.INT4)
                if i % 3 == 2:
                    bench.engine.abort(name)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        bench.step()
    out = bench.run()
    assert not faults
    assert not out.errors
    for number in range(4):
        for i in range(12):
            expected = greedy_ids([number, i, 3], 6)
            finish = out.finish(f"{number}.{i}")
            assert out.ids(f"{number}.{i}") == expected[: finish.usage.completion_tokens]
            assert (finish.reason is FinishReason.LENGTH) or i % 3 == 2
    assert bench.free == 12


def test_a_lost_device_ends_the_engine_and_not_one_request(make_bench: Callable[..., Any]) -> None:
    """An error after which the device answers nothing is the step's; others end their own request."""
    bench = make_bench()

    def lose(_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    bench.submit("a", [1, 2, 3])
    bench.runner.before_pass = lose
    with pytest.raises(torch.AcceleratorError):
        bench.step()
