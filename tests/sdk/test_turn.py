"""One turn: streams, answers, choices, plans and tools under one set of budgets."""

from __future__ import annotations

import asyncio

import pytest

import paceline
from paceline.errors import (
    ClosedError,
    DeadlineExpiredError,
    GenerationError,
    InfeasibleError,
    InvalidValueError,
    StallError,
    UnknownOptionError,
)
from paceline.testing import ManualClock, Reply, ScriptedBackend
from paceline_engine.mode import Variant


def play(script, body, *, slo=None, backend_options=None):
    """Run ``body(turn, clock, backend)`` in one turn; gives the report."""
    clock = ManualClock()
    backend = ScriptedBackend(script, clock=clock, **(backend_options or {}))

    async def main():
        async with paceline.AsyncClient(backend=backend, clock=clock, tracing=False) as client:
            async with client.turn(slo=slo) as turn:
                await body(turn, clock, backend)
            return turn.report

    return asyncio.run(main())


def test_stream_gives_text_and_stamps_each_delivery():
    """Chunks come in order, each stamped when it was handed over."""
    chunks = []

    async def body(turn, clock, backend):
        async for chunk in turn.stream("hi", max_tokens=8):
            chunks.append(chunk)
            assert chunk.delivered_at_s == clock()

    report = play("one two three", body)
    assert "".join(chunk.text for chunk in chunks) == "one two three"
    assert chunks[-1].finish is not None
    assert report.generations[0].finish_reason == "stop"
    assert report.generations[0].usage.completion_tokens == 3


def test_generate_gives_the_whole_answer():
    """An answer is its text, with usage, decision and a timeline of delivered times."""

    async def body(turn, clock, backend):
        answer = await turn.generate([{"role": "user", "content": "hi"}], max_tokens=8)
        assert str(answer) == answer.text == "a b"
        assert answer.finish_reason == "stop"
        assert answer.usage.completion_tokens == 2
        assert answer.decision.plan is not None
        assert answer.timeline.ttft_ms(delivered=True) == pytest.approx(50)

    play("a b", body)


def test_several_choices_count_the_prompt_once():
    """n choices give n texts; completion tokens add up, prompt tokens do not."""

    async def body(turn, clock, backend):
        answer = await turn.generate("hi", max_tokens=8, n=3)
        assert [choice.text for choice in answer.choices] == ["a b"] * 3
        assert answer.usage.completion_tokens == 6
        assert answer.usage.prompt_tokens == answer.choices[0].usage.prompt_tokens

    play("a b", body)


def test_choose_compares_equal_to_its_text():
    """A choice is its option, with every option's score and share."""

    async def body(turn, clock, backend):
        label = await turn.choose("which?", options=["refund", "rebook", "escalate"])
        assert label == "rebook"
        assert {"rebook": 1}[label] == 1
        assert label.text == "rebook"
        assert list(label.scores) == ["refund", "rebook", "escalate"]
        assert sum(label.probabilities.values()) == pytest.approx(1)

    report = play("rebook", body)
    assert report.generations[0].kind == "choose"
    assert [verdict.budget for verdict in report.verdicts] == ["e2e"]


@pytest.mark.parametrize("options", [[], "refund", ["a", "a"], ["a", ""], [1, 2], None])
def test_options_of_a_choice_are_checked(options):
    """A bare text, doubles, empty texts and other types are refused before anything runs."""

    async def body(turn, clock, backend):
        with pytest.raises(InvalidValueError):
            await turn.choose("which?", options=options)
        assert backend.received == []

    play("x", body)


def test_plan_runs_nothing_and_names_what_would_fit():
    """An infeasible plan says so, with the cheapest change; no call reaches the backend."""

    async def body(turn, clock, backend):
        decision = await turn.plan("hi", max_tokens=500)
        assert not decision.feasible
        assert decision.remedy is not None
        assert (await turn.plan("hi", max_tokens=8)).feasible
        assert backend.received == []

    assert play("x", body, slo=paceline.SLO(e2e_ms=1000)).generations == ()


def test_reject_carries_the_decision_and_keeps_a_record():
    """Where nothing fits and the SLO rejects, the error carries the numbers and nothing is sent."""

    async def body(turn, clock, backend):
        with pytest.raises(InfeasibleError) as caught:
            await turn.generate("hi", max_tokens=8)
        assert caught.value.decision.candidates
        assert backend.received == []

    report = play("x", body, slo=paceline.SLO(ttft_ms=10, on_infeasible="reject"))
    assert report.generations[0].error is not None
    assert report.generations[0].error.startswith("InfeasibleError")


def test_shorten_lowers_the_cap_visibly():
    """``shorten`` caps the tokens to what fits, and the decision shows the cap."""

    async def body(turn, clock, backend):
        answer = await turn.generate("hi", max_tokens=200)
        assert answer.decision.action == "shorten"
        assert answer.decision.plan.max_tokens == answer.usage.completion_tokens < 200
        assert answer.finish_reason == "length"

    report = play(" ".join(["w"] * 300), body, slo=paceline.SLO(e2e_ms=500, on_infeasible="shorten"))
    assert report.met


def test_tools_and_the_agents_own_time_spend_the_budget():
    """E2E runs from the turn's opening, so a later call has less left."""

    async def body(turn, clock, backend):
        async with turn.tool("lookup"):
            await clock.sleep(0.8)
        await clock.sleep(0.1)
        assert turn.remaining_ms() == pytest.approx(100)
        assert not (await turn.plan("hi", max_tokens=10)).feasible

    report = play("x", body, slo=paceline.SLO(e2e_ms=1000))
    assert [phase.name for phase in report.phases] == ["tool", "agent"]


def test_hard_deadline_ends_the_text_with_budget():
    """Under a hard SLO the generation ends at the turn's deadline, and the text so far is the caller's."""

    async def body(turn, clock, backend):
        await clock.sleep(0.3)
        stream = turn.stream("hi", max_tokens=100)
        answer = await stream.answer()
        assert answer.finish_reason == "budget"
        assert answer.text.startswith("w w")
        assert clock() - 1000 == pytest.approx(0.5)

    play(" ".join(["w"] * 100), body, slo=paceline.SLO(e2e_ms=500, hard=True))


@pytest.mark.parametrize("call", ["generate", "choose"])
def test_expired_hard_deadline_is_never_sent(call):
    """Work whose hard deadline has passed before dispatch raises, and the backend never sees it."""

    async def body(turn, clock, backend):
        await clock.sleep(0.6)
        wanted = {"generate": {"max_tokens": 8}, "choose": {"options": ["a", "b"]}}
        with pytest.raises(DeadlineExpiredError) as caught:
            await getattr(turn, call)("hi", **wanted[call])
        assert caught.value.late_ms == pytest.approx(100)
        assert backend.received == []

    play("x", body, slo=paceline.SLO(e2e_ms=500, hard=True))


def test_late_soft_work_runs_without_becoming_urgent():
    """Soft and late: the decision is infeasible, and the plan has no deadline that would be refused."""

    async def body(turn, clock, backend):
        await clock.sleep(0.6)
        answer = await turn.generate("hi", max_tokens=8)
        assert not answer.decision.feasible
        assert backend.received[0].plan.deadline_at_s is None
        assert backend.received[0].plan.first_token_by_s is None or (
            backend.received[0].plan.first_token_by_s > clock() - 1
        )

    report = play("x", body, slo=paceline.SLO(e2e_ms=500))
    assert not report.met


def test_call_slo_goes_before_the_turns():
    """A call's own budgets decide it and judge it, within the turn's deadline."""

    async def body(turn, clock, backend):
        await turn.generate("hi", max_tokens=2, slo=paceline.SLO(ttft_ms=40, e2e_ms=5000))
        assert not (await turn.plan("hi", max_tokens=100, slo=paceline.SLO(e2e_ms=50_000))).feasible

    report = play("x", body, slo=paceline.SLO(ttft_ms=100, e2e_ms=500))
    ttft = report.verdicts[0]
    assert (ttft.budget, ttft.limit_ms, ttft.met) == ("ttft", 40, False)


def test_error_mid_stream_keeps_the_text_and_the_turn_goes_on():
    """An error after two chunks keeps them; the next generation of the turn works."""

    async def body(turn, clock, backend):
        stream = turn.stream("hi", max_tokens=8)
        with pytest.raises(GenerationError) as caught:
            async for _ in stream:
                pass
        assert caught.value.partial_text == "one two"
        assert str(await turn.generate("hi", max_tokens=8)) == "fine"

    report = play([Reply("one two three", error_after=2), "fine"], body)
    assert [record.finish_reason for record in report.generations] == [None, "stop"]
    assert report.generations[0].usage.completion_tokens == 2


@pytest.mark.parametrize(("after", "phase"), [(0, "prefill"), (2, "decode")])
def test_stall_is_an_error_in_time(after, phase):
    """A stall ends with the limit, names the phase, and keeps the text."""

    async def body(turn, clock, backend):
        with pytest.raises(StallError) as caught:
            await turn.generate("hi", max_tokens=8)
        assert caught.value.phase == phase
        assert caught.value.partial_text == ("one two" if after else "")
        assert clock() - 1000 < 1.2

    report = play(
        Reply("one two three four", stall_after=after), body, slo=paceline.SLO(e2e_ms=None, stall_ms=1000)
    )
    assert report.generations[0].error is not None


def test_generations_may_run_side_by_side():
    """Two generations of one turn overlap in time, and both are recorded."""

    async def body(turn, clock, backend):
        answers = await asyncio.gather(*(turn.generate("hi", max_tokens=8) for _ in range(2)))
        assert [answer.text for answer in answers] == ["a b c", "a b c"]

    report = play("a b c", body)
    assert len(report.generations) == 2
    assert report.e2e_ms == pytest.approx(70)


def test_no_cap_fills_the_budget():
    """Without max_tokens the cap is what the budgets leave room for."""

    async def body(turn, clock, backend):
        decision = await turn.plan("hi")
        assert decision.plan.max_tokens == 61

    play("x", body, slo=paceline.SLO(ttft_ms=200, tpot_ms=30, e2e_ms=2000))


def test_late_consumer_is_to_blame():
    """What was made in time but taken late is the consumer's fault."""

    async def body(turn, clock, backend):
        async for _ in turn.stream("hi", max_tokens=20):
            await clock.sleep(0.05)

    report = play(" ".join(["w"] * 10), body)
    tpot = next(verdict for verdict in report.verdicts if verdict.budget == "tpot")
    assert (tpot.met, tpot.blame) == (False, "consumer")
    assert report.generations[0].timeline.tpot_ms() == pytest.approx(10)


def test_quality_goes_before_speed_when_both_fit():
    """The best variant that fits is taken; a tight budget moves to the faster one."""
    speeds = {Variant.BF16: 1.0, Variant.INT4: 0.4}

    async def body(turn, clock, backend):
        loose = await turn.plan("hi", max_tokens=20)
        tight = await turn.plan("hi", max_tokens=20, slo=paceline.SLO(tpot_ms=6))
        assert loose.plan.mode.variant == "bf16"
        assert tight.plan.mode.variant == "int4"

    play("x", body, backend_options={"speeds": speeds})


@pytest.mark.parametrize("name", ["temprature", "max_token", "top-p", "stream"])
def test_unknown_options_name_close_ones(name):
    """An option that does not exist is refused at once, with the nearest names."""

    async def body(turn, clock, backend):
        with pytest.raises(UnknownOptionError):
            turn.stream("hi", **{name: 1})

    play("x", body)


def test_close_match_is_suggested():
    """A misspelt option's error holds the right spelling."""

    async def body(turn, clock, backend):
        with pytest.raises(UnknownOptionError, match="temperature"):
            turn.stream("hi", temprature=1)

    play("x", body)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": "hot"},
        {"temperature": True},
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": 10**400},
        {"top_p": 2},
        {"n": 10**30},
        {"logit_bias": {1: 10**400}},
        {"top_k": 1.5},
        {"n": 0},
        {"n": "2"},
        {"seed": "x"},
        {"stop": [""]},
        {"stop": ""},
        {"stop": 3},
        {"stop": [3]},
        {"stop_token_ids": "12"},
        {"logit_bias": [1]},
        {"logit_bias": {"a": 1}},
        {"logprobs": 50},
        {"min_tokens": -1},
        {"ignore_eos": 1},
        {"salt": None},
        {"adapter": 3},
        {"max_tokens": 0},
        {"max_tokens": True},
        {"max_tokens": 2.0},
        {"slo": 200},
    ],
)
def test_wrong_values_are_refused_at_once(options):
    """Wrong types and ranges raise where the call is written, before the stream is iterated."""

    async def body(turn, clock, backend):
        with pytest.raises(InvalidValueError):
            turn.stream("hi", **options)

    play("x", body)


@pytest.mark.parametrize(
    "messages", ["", [], None, 3, [3], ["hi"], [{}], [{"content": "x"}], {"role": "user"}]
)
def test_empty_and_malformed_conversations_are_refused(messages):
    """A conversation needs at least one message with a role."""

    async def body(turn, clock, backend):
        with pytest.raises(InvalidValueError):
            turn.stream(messages)

    play("x", body)


def test_a_turn_is_used_only_while_it_is_open():
    """Before it is entered and after it was closed every call names what to do."""
    clock = ManualClock()
    backend = ScriptedBackend("a b", clock=clock)

    async def main():
        client = paceline.AsyncClient(backend=backend, clock=clock, tracing=False)
        turn = client.turn()
        for use in (lambda: turn.stream("hi"), lambda: turn.tool("x"), lambda: turn.report):
            with pytest.raises(ClosedError, match="async with"):
                use()
        async with turn:
            unread = turn.stream("hi")
        for use in (lambda: turn.stream("hi"), lambda: turn.tool("x")):
            with pytest.raises(ClosedError, match="closed"):
                use()
        for call in (turn.generate("hi"), turn.choose("hi", options=["a"]), turn.plan("hi"), anext(unread)):
            with pytest.raises(ClosedError):
                await call
        with pytest.raises(ClosedError):
            async with turn:
                pass
        await client.aclose()
        with pytest.raises(ClosedError):
            client.turn()
        with pytest.raises(ClosedError):
            await client.warm("hi")

    asyncio.run(main())


def test_a_failed_tool_is_recorded():
    """A tool that raises ends its phase, and the error passes through."""

    async def body(turn, clock, backend):
        with pytest.raises(KeyError):
            async with turn.tool("lookup"):
                raise KeyError("x")
        with turn.tool("plain"):
            clock.advance(0.01)

    report = play("x", body)
    assert [(tool.name, tool.error is None) for tool in report.tools] == [("lookup", False), ("plain", True)]
