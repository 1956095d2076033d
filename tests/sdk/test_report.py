"""Verdicts, blame, phases, and how a report reads."""

from __future__ import annotations

import asyncio
import json

import pytest

import paceline
from paceline.report import decision_table, decision_to_dict
from paceline.testing import ManualClock, Reply, ScriptedBackend


def run(script, body=None, *, slo=None, **options):
    clock = ManualClock()
    backend = ScriptedBackend(script, clock=clock, **options)

    async def read(turn, clock):
        await turn.generate("hi", max_tokens=8)

    async def main():
        async with paceline.AsyncClient(backend=backend, clock=clock, tracing=False) as client:
            async with client.turn(slo=slo) as turn:
                await (body or read)(turn, clock)
            return turn.report

    return asyncio.run(main())


def verdict(report, budget):
    return next(each for each in report.verdicts if each.budget == budget)


async def _slow_tool(turn, clock):
    async with turn.tool("lookup"):
        await clock.sleep(2.5)
    await turn.generate("hi", max_tokens=4)


async def _slow_agent(turn, clock):
    await turn.generate("hi", max_tokens=4)
    await clock.sleep(2.5)


async def _slow_reader(turn, clock):
    async for _ in turn.stream("hi", max_tokens=8):
        await clock.sleep(0.4)


@pytest.mark.parametrize(
    ("script", "body", "budget", "blame"),
    [
        (Reply("a b", prefill_ms=300), None, "ttft", "prefill"),
        (Reply("a b", queue_ms=300), None, "ttft", "queue"),
        (Reply("a b", queue_ms=120, prefill_ms=140), None, "ttft", "queue"),
        (Reply("a b c d", tpot_ms=60), None, "tpot", "decode"),
        (Reply("a b c d", tpot_ms=800), None, "e2e", "decode"),
        (Reply("a b", prefill_ms=2500), None, "e2e", "prefill"),
        ("a b", _slow_tool, "e2e", "tool"),
        ("a b", _slow_agent, "e2e", "agent"),
        ("a b c d e f g", _slow_reader, "tpot", "consumer"),
        ("a b c d e f g", _slow_reader, "e2e", "consumer"),
    ],
)
def test_a_miss_is_blamed_on_the_phase_that_ran_over(script, body, budget, blame):
    """Each scripted delay is found: the phase that exceeded its prediction most is blamed."""
    found = verdict(run(script, body), budget)
    assert not found.met
    assert found.blame == blame
    assert found.over_ms == pytest.approx(found.measured_ms - found.limit_ms)
    assert blame in found.detail


def test_a_miss_that_was_predicted_blames_the_largest_phase():
    """Where the prediction itself was over the limit, nothing was slower than known: the largest counts."""
    report = run(Reply("a b", queue_ms=60, prefill_ms=500), prefill_ms=500)
    found = verdict(report, "ttft")
    assert found.blame == "prefill"
    assert "over the limit before it ran" in found.detail


def test_a_predicted_queue_does_not_hide_a_slow_prefill():
    """A queue that was expected is not blamed for a prefill that was not."""
    report = run(Reply("a b", queue_ms=50, prefill_ms=180), waiting_prefill_tokens=10)
    assert report.generations[0].predicted_queue_ms == pytest.approx(50)
    assert verdict(report, "ttft").blame == "prefill"


def test_the_worst_generation_is_the_turns_verdict():
    """TTFT and TPOT are those of the generation that was furthest over."""

    async def body(turn, clock):
        for _ in range(3):
            await turn.generate("hi", max_tokens=4)

    report = run(["a b", Reply("a b", prefill_ms=400), "a b"], body)
    found = verdict(report, "ttft")
    assert found.measured_ms == pytest.approx(400)
    assert found.detail.startswith("generation 2")


@pytest.mark.parametrize(
    ("sizes", "gaps", "tpot_ms"), [((3, 1, 4), (40, 40), 16.0), ((8,), (), None), ((1, 7), (70,), 10.0)]
)
def test_tpot_divides_by_the_tokens_after_the_first_chunk(sizes, gaps, tpot_ms):
    """Chunks of several tokens count all of them; one chunk alone has no TPOT, and no verdict."""
    report = run(Reply("a b c d e f g h", tokens_per_chunk=sizes, tpot_ms=gaps or None))
    assert report.generations[0].timeline.tpot_ms(delivered=True) == (
        None if tpot_ms is None else pytest.approx(tpot_ms)
    )
    assert any(each.budget == "tpot" for each in report.verdicts) == (tpot_ms is not None)


def test_an_empty_opening_chunk_is_no_first_token():
    """A chunk with a role and no text at 0 ms does not count; the text at 200 ms does."""
    from paceline.collect import Collector
    from paceline_engine.chunk import Chunk, Finish, FinishReason, Usage
    from paceline_engine.mode import Mode, Variant
    from paceline_engine.timeline import Timeline, TokenTime

    clock = ManualClock(0.0)
    mode = Mode(variant=Variant.BF16)
    collector = Collector(n=1, mode=mode, submitted_at_s=0.0, clock=clock)
    assert collector.take(Chunk(text="", made_at_s=0.0)) is None
    clock.advance(0.2)
    line = Timeline(
        mode=mode, submitted_at_s=0.0, tokens=(TokenTime(made_at_s=0.2),), finished_at_s=0.2, started_at_s=0.0
    )
    finish = Finish(
        reason=FinishReason.STOP, usage=Usage(prompt_tokens=1, completion_tokens=1), timeline=line
    )
    assert collector.take(Chunk(text="x", made_at_s=0.2, finish=finish)) is not None
    assert collector.timeline(prompt_tokens=1, cached_tokens=0).ttft_ms(delivered=True) == pytest.approx(200)


def test_no_token_at_all_is_a_miss_once_the_limit_passed():
    """A generation that failed before its first token missed TTFT if it waited longer than that."""

    async def body(turn, clock):
        with pytest.raises(paceline.GenerationError):
            await turn.generate("hi", max_tokens=4)

    late = run(Reply("a", prefill_ms=500, error_after=0), body)
    early = run(Reply("a", prefill_ms=100, error_after=0), body)
    assert not verdict(late, "ttft").met
    assert [each.budget for each in early.verdicts] == ["e2e"]


def test_budgets_left_out_have_no_verdict():
    """None leaves a budget out of the verdicts."""
    report = run("a b", slo=paceline.SLO(ttft_ms=None, tpot_ms=None, e2e_ms=None))
    assert report.verdicts == ()
    assert report.met
    assert "no budget was measured" in str(report)


def test_phases_cover_the_turn_in_order():
    """The phases of a turn are sorted, and leave no gap: what nothing covers is the agent's."""

    async def body(turn, clock):
        await clock.sleep(0.1)
        await turn.generate("hi", max_tokens=4)
        async with turn.tool("t"):
            await clock.sleep(0.1)
        await clock.sleep(0.1)

    report = run("a b", body)
    names = [phase.name for phase in report.phases if phase.duration_ms > 0]
    assert names == ["agent", "prefill", "decode", "tool", "agent"]
    assert sum(phase.duration_ms for phase in report.phases) == pytest.approx(report.e2e_ms)


def test_the_text_names_the_miss_and_fits_100_columns():
    """A person sees what was missed, by how much, whom to blame, and every mode's numbers."""

    async def body(turn, clock):
        async with turn.tool("a_tool_with_quite_a_long_name_for_its_row"):
            await clock.sleep(0.5)
        await turn.generate("hi", max_tokens=4)
        await turn.choose("hi", options=["a", "b"])

    text = str(run(Reply("a b c", prefill_ms=333), body))
    assert text.splitlines()[0] == "turn 'agent': MISSED ttft by 133 ms (prefill)"
    assert "due to prefill" in text
    assert "prefill took 333 ms, predicted 50.0 ms" in text
    assert "50.0/50.0 ms" in text
    assert max(map(len, text.splitlines())) <= 100
    assert text.isascii()


def test_to_dict_is_json():
    """The report and a decision become plain JSON, whatever a phase's attributes hold."""
    report = run("a b c")
    found = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert found["met"] is True
    assert found["generations"][0]["finish_reason"] == "stop"
    assert found["generations"][0]["timeline"]["tokens"][0]["made_ms"] == pytest.approx(50)
    decision = report.generations[0].decision
    assert json.loads(json.dumps(decision_to_dict(decision)))["mode"] == "bf16"
    assert "taken" in decision_table(decision)


def test_a_turn_that_is_open_has_a_report_so_far():
    """The report of an open turn holds what happened until now, a running tool included."""

    async def body(turn, clock):
        await turn.generate("hi", max_tokens=4)
        async with turn.tool("t"):
            await clock.sleep(0.1)
            assert [tool.name for tool in turn.report.tools] == ["t"]
            assert len(turn.report.generations) == 1

    run("a b", body)


def test_a_refused_call_is_no_success() -> None:
    """The headline tells of calls that were refused, not of budgets that nothing was measured against."""

    async def refused(turn, clock):
        await turn.generate("hi", max_tokens=2)
        with pytest.raises(paceline.InfeasibleError):
            await turn.generate("hi", max_tokens=8, slo=paceline.SLO(ttft_ms=1, on_infeasible="reject"))

    headline = str(run("yes", refused, slo=paceline.SLO(e2e_ms=60_000))).splitlines()[0]
    assert "REFUSED 1 of 2 calls" in headline
    assert "met every budget" not in headline
