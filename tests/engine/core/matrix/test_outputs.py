"""What a request gives is the same in every mode: its tokens, its text and how it ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from paceline_engine.cache.blocks import BlockPool
from paceline_engine.chunk import FinishReason
from paceline_engine.errors import UnknownOptionError
from paceline_engine.request import SamplingParams

OpenCase = Callable[..., Any]
Solo = Callable[..., Any]

ONE = [65, 66, 67, 68, 69, 70]
"""A block and a half."""
TWO = [*ONE, 71, 72, 73, 74, 75]
THREE = [90, 91, 92]


def looping(bench: Any) -> None:
    """Let the model mostly repeat its token of four places before, so that n-grams are often right."""

    def change(seen: Sequence[int], logits: torch.Tensor) -> None:
        if len(seen) >= 4 and (len(seen) * 7) % 11:
            logits[seen[-4]] += 100

    bench.runner.change_row = change


_SETUPS: dict[str, Callable[[Any], None]] = {}


def known_setup(setup: Callable[[Any], None], name: str) -> Callable[[Any], None]:
    """The same function for the same name, since what it gives alone is found once."""
    return _SETUPS.setdefault(name, setup)


def scripted(bench: Any, n_prompt: int, script: Sequence[int]) -> None:
    """Let the model say ``script``."""

    def change(seen: Sequence[int], logits: torch.Tensor) -> None:
        at = len(seen) - n_prompt
        if 0 <= at < len(script):
            logits[script[at]] += 1000

    bench.runner.change_row = change


def test_batched_rows_are_as_alone(case: Any, open_case: OpenCase, solo: Solo) -> None:
    """Unequal prompts together give what each gives alone, twice, and drafts and moves really happen."""
    prompts = {"one": ONE, "two": TWO, "three": THREE}
    bench = open_case(case)
    for again in ("", " again"):
        for name, prompt in prompts.items():
            bench.submit(name + again, prompt, bench.plan(16), ignore_eos=True)
        out = bench.run()
        assert not out.errors
        for name, prompt in prompts.items():
            assert [bench.outcome(name + again)] == solo(case, prompt, 16, ignore_eos=True)
            cached = out.finish(name + again).usage.cached_tokens
            if not case.cached:
                assert cached == 0
            elif again and not case.crowded:
                assert cached == (len(prompt) - 1) // 4 * 4
    timelines = [out.finish(name).timeline for name in prompts]
    n_drafted = sum(timeline.drafted_tokens for timeline in timelines)
    assert case.drafter == "ngram" or (n_drafted > 0) == (case.drafter == "self")
    events = {event.name for timeline in timelines for event in timeline.events}
    assert ("variant_changed" in events) == (case.policy == "moving")
    assert ("preempted" in events) <= case.crowded


def test_continuations_of_a_partial_block(case: Any, open_case: OpenCase, solo: Solo) -> None:
    """Two prompts that part in the middle of a block, together and after their prefix ran."""
    bench = open_case(case)
    bench.submit("warm", ONE, bench.plan(1))
    bench.run()
    for name, more in (("seven", 7), ("eight", 8), ("same", 7)):
        bench.submit(name, [*ONE, more], bench.plan(9), ignore_eos=True)
    out = bench.run()
    for name, more in (("seven", 7), ("eight", 8), ("same", 7)):
        assert [bench.outcome(name)] == solo(case, [*ONE, more], 9, ignore_eos=True)
        assert out.finish(name).usage.cached_tokens in ((4,) if case.cached else (0,))


@pytest.mark.parametrize("collide", [False, True])
def test_salts_share_nothing(case: Any, open_case: OpenCase, solo: Solo, collide: bool) -> None:
    """Salts a, a, b: a hit for the second alone, right output for all, also where every hash is the same."""
    bench = open_case(case)
    if collide:
        pool = BlockPool(bench.runner.n_blocks, 4, hash_key=lambda content: 7)
        bench.engine._pool = bench.engine._scheduler.pool = pool
    cached = []
    for name, salt in (("first", "a"), ("second", "a"), ("third", "b")):
        bench.submit(name, TWO, bench.plan(3), salt=salt, ignore_eos=True)
        cached.append(bench.run().finish(name).usage.cached_tokens)
        assert [bench.outcome(name)] == solo(case, TWO, 3, ignore_eos=True)
    assert cached == [0, 8 if case.cached else 0, 0]
    assert set(bench.engine.snapshot(TWO, salt="c").cached_tokens.values()) == {0}


def test_adapters_share_nothing(
    case: Any, open_case: OpenCase, solo: Solo, adapters: Callable[[str], dict[str, str]]
) -> None:
    """One prompt on the model, on adapters A and B, and on A with new weights: each gives what it gives from
    cold, alone and side by side, and hits only what the same weights wrote."""
    folders = adapters(case.family)

    def serving(folder: str) -> Callable[[Any], None]:
        return known_setup(lambda bench: bench.engine.load_adapter("any", folder), folder)

    cold = {None: solo(case, TWO, 6, ignore_eos=True)}
    for name, folder in folders.items():
        cold[name] = solo(case, TWO, 6, setup=serving(folder), adapter="any", ignore_eos=True)
    assert len({repr(found) for found in cold.values()}) == 4

    bench = open_case(case)
    for name in ("A", "B"):
        bench.engine.load_adapter(name, folders[name])
    for again in ("", " again"):
        for name in (None, "A", "B"):
            bench.submit(f"{name}{again}", TWO, bench.plan(6), adapter=name, ignore_eos=True)
        bench.run()
        for name in (None, "A", "B"):
            assert [bench.outcome(f"{name}{again}")] == cold[name], name
    bench.submit("old", TWO, bench.plan(6), adapter="A", ignore_eos=True)
    bench.step()
    bench.engine.load_adapter("A", folders["A reloaded"])
    bench.submit("new", TWO, bench.plan(6), adapter="A", ignore_eos=True)
    out = bench.run()
    assert [bench.outcome("old")] == cold["A"]
    assert [bench.outcome("new")] == cold["A reloaded"]
    assert out.finish("new").usage.cached_tokens == 0
    bench.engine.load_adapter("alias", folders["A"])
    if case.cached and not case.crowded:
        assert bench.engine.snapshot(TWO, adapter="alias").cached_tokens[case.variant] == 8
    bench.engine.unload_adapter("B")
    with pytest.raises(UnknownOptionError, match="alias"):
        bench.submit("gone", TWO, bench.plan(6), adapter="B")


SAMPLINGS = {
    "greedy": SamplingParams(repetition_penalty=1.4),
    "chance": SamplingParams(temperature=0.7, top_p=0.9, seed=3),
    "all": SamplingParams(
        temperature=1.1,
        top_k=40,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias={70: 4.0},
        min_tokens=5,
        logprobs=2,
        seed=4,
    ),
}


def test_every_rule_draws_the_same(case: Any, open_case: OpenCase, solo: Solo) -> None:
    """Penalties, chance, bias and log probabilities, for several choices, side by side."""
    bench = open_case(case)
    looping(bench)
    for name, sampling in SAMPLINGS.items():
        bench.submit(name, TWO, bench.plan(12), sampling=sampling, n=2)
    out = bench.run()
    assert not out.errors
    for name, sampling in SAMPLINGS.items():
        expected = solo(case, TWO, 12, setup=looping, sampling=sampling, n=2)
        assert [bench.outcome(name, index) for index in range(2)] == expected, name
    if case.drafter == "ngram":
        assert out.finish("greedy").timeline.accepted_tokens > 0


def test_seeds(case: Any, open_case: OpenCase, solo: Solo) -> None:
    """Seed 42 draws beside others what it draws alone; two copies without a seed differ."""
    bench = open_case(case)
    seeds = {"a": None, "b": 42, "c": None, "d": 7}
    for name, seed in seeds.items():
        bench.submit(
            name, THREE, bench.plan(8), sampling=SamplingParams(temperature=2.0, seed=seed), ignore_eos=True
        )
    bench.run()
    for name, seed in (("b", 42), ("d", 7)):
        sampling = SamplingParams(temperature=2.0, seed=seed)
        assert [bench.outcome(name)] == solo(case, THREE, 8, sampling=sampling, ignore_eos=True)
    assert len({tuple(bench.out.ids(name)) for name in seeds}) == 4


@pytest.mark.parametrize("n_after", [0, 3])
def test_an_end_within_drafts(case: Any, open_case: OpenCase, n_after: int) -> None:
    """[10, 11, END, 20, 21, 22] under a cap of 5 ends at END, of which drafts behind it change nothing; an
    END past the cap gives "length", cut at the cap."""
    end = 200
    script = [*range(10, 12 + n_after), end, 20, 21, 22]
    prompt = [7, 8, *script, 7, 8]
    bench = open_case(case)
    scripted(bench, len(prompt), script)
    bench.submit("a", prompt, bench.plan(5), stop_token_ids=(end,))
    out = bench.run()
    finish = out.finish("a")
    assert out.ids("a") == script[:5][: 3 if n_after == 0 else 5]
    assert finish.reason is (FinishReason.LENGTH if n_after else FinishReason.STOP)
    assert finish.usage.completion_tokens == len(out.ids("a"))
    if case.drafter != "none" and case.policy != "moving":
        assert finish.timeline.accepted_tokens > 0
    assert finish.timeline.accepted_tokens <= len(out.ids("a")) - 1


def test_min_tokens(case: Any, open_case: OpenCase, solo: Solo) -> None:
    """Of two end tokens that are always wanted none comes in the first four places, and one in the fifth."""
    bench = open_case(case)
    ends = (bench.tokenizer.eos_token_ids[0], 201)
    sampling = SamplingParams(min_tokens=4, logit_bias=dict.fromkeys(ends, 500.0))
    for name in ("one", "two"):
        bench.submit(name, TWO, bench.plan(9), sampling=sampling, stop_token_ids=(201,))
    out = bench.run()
    expected = solo(case, TWO, 9, sampling=sampling, stop_token_ids=(201,))
    for name in ("one", "two"):
        assert [bench.outcome(name)] == expected
        ids = out.ids(name)
        assert len(ids) == 5
        assert not set(ends) & set(ids[:4])
        assert ids[4] in ends
        assert out.finish(name).reason is FinishReason.STOP


def test_stop_strings(case: Any, open_case: OpenCase) -> None:
    """Nothing is sent of a stop string that comes in pieces, nor of what follows; a near miss is sent."""
    bench = open_case(case)
    word = bench.tokenizer.word
    whole = [97, word("DEF"), word("G"), word("HI"), word("J"), 98, 99]
    near = [97, word("DEFG"), word("HI"), 98, 99]
    for script, text, stop, n_tokens in (
        (whole, "a", "DEFGHIJ", 5),
        (near, "aDEFGHIb", None, 4),
    ):
        prompt = [1, 2, *script, 1, 2]
        scripted(bench, len(prompt), script)
        name = str(stop)
        bench.submit(name, prompt, bench.plan(n_tokens + (stop is not None)), stop=("DEFGHIJ",))
        out = bench.run()
        assert out.text(name) == text
        assert out.finish(name).stop_text == stop
        assert out.ids(name) == script[:n_tokens]
        assert out.finish(name).usage.completion_tokens == n_tokens
        if stop:
            assert not any("D" in chunk.text for chunk in out.chunks[name])


def test_pieces_join_to_the_whole(case: Any, open_case: OpenCase) -> None:
    """Bytes of a character wait for the rest of it, and only what is invalid is replaced."""
    texts = {
        "🙂".encode() + b"ab": "🙂ab",
        b"\xf0\x9f \x99\x82ab": "\ufffd \ufffd\ufffdab",
        b"a\xffbcd": "a\ufffdbcd",
        b"ab\xf0\x9f": "ab\ufffd",
    }
    bench = open_case(case)
    for data, text in texts.items():
        script, name = list(data), repr(data)
        prompt = [1, 2, *script, 1, 2]
        scripted(bench, len(prompt), script)
        bench.submit(name, prompt, bench.plan(len(script)), ignore_eos=True)
        out = bench.run()
        assert out.ids(name) == script
        assert out.text(name) == text == bench.tokenizer.decode(script)
        for chunk in out.chunks[name]:
            assert "\ufffd" not in chunk.text or "\ufffd" in text


def test_scores(case: Any, open_case: OpenCase) -> None:
    """Options score the same beside a stream, from a warm cache and under every policy."""
    options = (" is", "the end", "x", "the ")
    found = []
    for one in (case.plain, case):
        bench = open_case(one)
        bench.submit("beside", ONE, bench.plan(12), ignore_eos=True)
        for name in ("first", "second"):
            bench.score(name, TWO, options, bench.plan(1))
            out = bench.run()
            found.append([score.logprob for score in out.scores[name].scores])
    for scores in found[1:]:
        assert scores == pytest.approx(found[0], abs=1e-3)
