"""Grammars in the step loop."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

pytest.importorskip("llguidance", reason="grammars need llguidance")

from paceline_engine.chunk import FinishReason
from paceline_engine.errors import InvalidValueError
from paceline_engine.grammar.base import Grammar
from paceline_engine.request import SamplingParams

WORDS = Grammar.regex(r"([A-Z]{2} )+[a-z]{3}\{\}")


def test_every_choice_keeps_to_the_grammar_and_lands(make_bench: Callable[..., object]) -> None:
    """Several choices, each with a state of its own, match within the cap, and a landing is an event."""
    bench = make_bench(n_blocks=64)
    bench.submit(
        "a", [1, 2, 3], bench.plan(20), grammar=WORDS, n=3, sampling=SamplingParams(temperature=2.0, seed=5)
    )
    bench.submit("b", [1, 2, 3], bench.plan(20))
    out = bench.run()
    texts = [out.text("a", index) for index in range(3)]
    assert all(re.fullmatch(WORDS.text, text) for text in texts), texts
    assert len(set(texts)) > 1
    for index in range(3):
        finish = out.finish("a", index)
        events = [event for event in finish.timeline.events if event.name == "landing"]
        assert len(events) == (finish.reason is FinishReason.LENGTH)
    assert len(out.ids("b")) == 20


def test_preemption_keeps_the_state(make_bench: Callable[..., object]) -> None:
    """A sequence that lost its blocks in between gives the tokens that it gives alone."""
    long = Grammar.regex("([A-Z]{2} ){7}")
    alone = make_bench(n_blocks=64)
    alone.submit("a", [1, 2, 3], alone.plan(24), grammar=long)
    expected = alone.run().ids("a")
    tight = make_bench(n_blocks=8)
    for name, prompt in (("b", [4, 5]), ("a", [1, 2, 3])):
        tight.submit(name, prompt, tight.plan(24), grammar=long)
    out = tight.run()
    assert out.ids("a") == expected
    assert any(event.name == "preempted" for name in "ab" for event in out.finish(name).timeline.events)


def test_a_cap_below_the_shortest_output_is_refused(make_bench: Callable[..., object]) -> None:
    """A cap in which no output fits is an error with the least that would do, and nothing runs."""
    bench = make_bench()
    with pytest.raises(InvalidValueError, match="at least 8"):
        bench.submit("a", [1], bench.plan(7), grammar=WORDS)
    assert not bench.engine.has_work
    bench.submit("a", [1], bench.plan(8), grammar=WORDS)
    assert re.fullmatch(WORDS.text, bench.run().text("a"))


def test_a_hard_deadline_brings_the_output_to_its_end(make_bench: Callable[..., object]) -> None:
    """Before a hard deadline the output is closed in time, at the pace measured, and says so."""
    bench = make_bench(n_blocks=200)
    plan = bench.plan(500, deadline_at_s=bench.clock.now_s + 0.4, hard_deadline=True)
    bench.submit("a", [1, 2, 3], plan, grammar=WORDS)
    out = bench.run()
    assert re.fullmatch(WORDS.text, out.text("a"))
    assert out.finish("a").reason in (FinishReason.BUDGET, FinishReason.STOP)


def test_ignore_eos_and_a_grammar_exclude_one_another(make_bench: Callable[..., object]) -> None:
    """A grammar says where the output ends, so going on beyond that is refused."""
    with pytest.raises(InvalidValueError, match="ignore_eos"):
        make_bench().submit("a", [1], grammar=WORDS, ignore_eos=True)


def test_the_first_use_of_a_grammar_is_a_phase_of_its_own(make_bench: Callable[..., object]) -> None:
    """What compiling took stands before the queue in the timeline; the second use has no such phase."""
    bench = make_bench(n_blocks=64)
    for name in ("first", "second"):
        bench.submit(name, [1, 2, 3], bench.plan(20), grammar=WORDS)
    out = bench.run()
    first, second = ([one.name for one in out.finish(name).timeline.phases()] for name in ("first", "second"))
    assert first == ["grammar", "queue", "prefill", "decode"]
    assert second == ["queue", "prefill", "decode"]
