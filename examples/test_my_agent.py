"""Tests of an agent, without a model and without waiting: pytest examples/test_my_agent.py"""

import asyncio

import pytest

import paceline
from paceline.testing import ManualClock, Reply, ScriptedBackend


async def agent(client: paceline.AsyncClient, question: str) -> tuple[str, paceline.Report]:
    """The agent under test: it falls back to a fixed sentence where little time is left."""
    async with client.turn("agent", slo=paceline.SLO(ttft_ms=200, tpot_ms=30, e2e_ms=1000)) as turn:
        kind = await turn.choose(question, options=["order", "other"])
        if (turn.remaining_ms() or 0) < 500:
            text = "I will get back to you."
        else:
            text = (await turn.generate(f"{kind}: {question}", max_tokens=16)).text
    return text, turn.report


def play(*replies: Reply) -> tuple[str, paceline.Report, ScriptedBackend]:
    clock = ManualClock()
    backend = ScriptedBackend(list(replies), clock=clock)

    async def main() -> tuple[str, paceline.Report]:
        async with paceline.AsyncClient(backend=backend, clock=clock) as client:
            return await agent(client, "Where is my parcel?")

    return *asyncio.run(main()), backend


def test_a_quick_model_answers() -> None:
    text, report, backend = play(Reply("order", prefill_ms=80), Reply("It is on its way.", tpot_ms=20))
    assert text == "It is on its way."
    assert report.met
    assert [len(backend.received), backend.received[1].plan.max_tokens] == [2, 16]


def test_a_slow_choice_leads_to_the_fixed_sentence() -> None:
    text, report, _ = play(Reply("order", prefill_ms=600))
    assert text == "I will get back to you."
    assert report.met


def test_a_slow_answer_is_blamed_on_decoding() -> None:
    text, report, _ = play(Reply("order", prefill_ms=80), Reply("It is on its way.", tpot_ms=90))
    assert text == "It is on its way."
    assert {verdict.budget: verdict.blame for verdict in report.verdicts if not verdict.met} == {
        "tpot": "decode"
    }


def test_a_model_that_fails_in_mid_answer_keeps_its_text() -> None:
    with pytest.raises(paceline.GenerationError) as failed:
        play(Reply("order"), Reply("It is on its way.", error_after=2))
    assert failed.value.partial_text == "It is"
