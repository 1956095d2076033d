"""The step policy's numbers on their way to the worker, and streams that move to another variant."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

import paceline
from paceline.client import _embedded
from paceline.errors import InvalidValueError, UnknownOptionError
from paceline.step_policy import StepPolicyLink
from paceline.testing import ManualClock, ScriptedBackend
from paceline_engine.backends.embedded import EmbeddedBackend, EmbeddedConfig
from paceline_engine.mode import Variant
from paceline_policies.pacing import STEP_POLICY, StepNumbers

SPEEDS = {Variant.BF16: 1.0, Variant.INT8: 0.6, Variant.INT4: 0.4}


def embedded(**settings):
    return EmbeddedBackend(
        EmbeddedConfig(
            model="toy",
            host="thread",
            variants=(Variant.BF16, Variant.INT4),
            source="paceline_engine.backends.embedded.scripted",
            source_options={"step_s": 0.0005},
            **settings,
        )
    )


def test_the_clients_own_engine_has_the_step_policy():
    """The embedded engine that a client makes names the policy that its worker imports."""
    assert _embedded("toy", {}).config.step_policy == STEP_POLICY


def test_numbers_are_sent_when_known_and_when_they_moved():
    """A profile's numbers are sent once, again when a pass costs 5% more, and not for less."""
    sent = []
    link = StepPolicyLink(sent.append)
    profile = ScriptedBackend("x", speeds=SPEEDS).profile

    def slower(scale):
        return replace(
            profile,
            variants={name: replace(each, decode_scale=scale) for name, each in profile.variants.items()},
        )

    for scale in (1.0, 1.02, 1.04, 1.10, 1.10):
        link.renew(slower(scale))
    assert [StepNumbers.from_dict(each).variants[Variant.BF16].decode_scale for each in sent] == [1.0, 1.10]


def test_a_policy_of_the_callers_own_gets_no_numbers():
    """Only a backend that runs this policy is linked to it."""
    assert StepPolicyLink.of(ScriptedBackend("x")) is None
    assert StepPolicyLink.of(embedded()) is None
    assert StepPolicyLink.of(embedded(step_policy="my.module:factory")) is None
    assert StepPolicyLink.of(embedded(step_policy=STEP_POLICY)) is not None


def test_a_client_hands_over_its_profile(tmp_path, monkeypatch):
    """Once calibrated, the worker's policy runs with the profile's numbers."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    backend = embedded(step_policy=STEP_POLICY)

    async def main():
        client = paceline.AsyncClient(backend=backend, profile="quick", tracing=False)
        async with client, client.turn() as turn:
            await turn.generate("hi", max_tokens=4)
            return StepNumbers.from_dict(backend._supervisor._numbers)

    numbers = asyncio.run(main())
    assert set(numbers.variants) == {Variant.BF16, Variant.INT4}


def stream_of(backend, body):
    async def main():
        async with (
            paceline.AsyncClient(backend=backend, profile="assume", tracing=False) as client,
            client.turn(slo=paceline.SLO(e2e_ms=None)) as turn,
        ):
            await body(turn)
            return turn.report

    return asyncio.run(main())


def test_a_caller_moves_a_stream_and_the_report_shows_it():
    """A stream goes on as the variant asked for; report and waterfall say when, from where and why."""

    async def body(turn):
        stream = turn.stream("hi", max_tokens=60)
        await anext(stream)
        first = stream.decision.plan.mode.variant
        await stream.change_variant("int4" if first == "bf16" else "bf16")
        await stream.answer()
        await stream.change_variant("int4")

    report = stream_of(embedded(), body)
    (event,) = report.generations[0].timeline.events
    assert event.name == "variant_changed"
    moved = (event.attributes["from"], event.attributes["to"])
    assert sorted(moved) == ["bf16", "int4"]
    assert event.attributes["why"] == "the caller"
    text = str(report)
    assert f"{moved[0]} to {moved[1]}, the caller" in text
    (row,) = [line for line in text.splitlines() if f"1 {moved[0]} > {moved[1]}" in line]
    assert "^" in row
    assert max(map(len, text.splitlines())) <= 100
    (decode,) = [phase for phase in report.phases if phase.name == "decode"]
    assert (decode.attributes["variant_changes"], decode.attributes["last_variant"]) == (1, moved[1])
    assert report.to_dict()["generations"][0]["timeline"]["events"][0]["attributes"] == event.attributes


def test_what_cannot_be_moved_says_so():
    """A stream that has not begun, an unknown variant and a backend that cannot are refused."""

    class Unable(ScriptedBackend):
        change_variant = None

    async def body(turn):
        stream = turn.stream("hi", max_tokens=8)
        with pytest.raises(InvalidValueError, match="begun"):
            await stream.change_variant("int4")
        await anext(stream)
        with pytest.raises(UnknownOptionError, match="fp8"):
            await stream.change_variant("fp8")
        with pytest.raises(InvalidValueError, match="cannot move"):
            await stream.change_variant("int4")

    stream_of(Unable("one two three four", speeds=SPEEDS), body)


def test_the_sync_face_moves_a_stream_too():
    """``Stream.change_variant`` reaches the backend with the request's id."""
    backend = ScriptedBackend("one two three", speeds=SPEEDS)
    with paceline.Client(backend=backend, tracing=False) as client, client.turn() as turn:
        stream = turn.stream("hi", max_tokens=8)
        next(stream)
        stream.change_variant(Variant.INT4)
        stream.answer()
    assert [variant for _, variant in backend.moved] == [Variant.INT4]
    assert backend.moved[0][0] == backend.received[0].request.id


def test_plans_carry_what_a_stream_may_fall_to():
    """A turn's SLO decides the variants below the chosen one that its streams may be moved to."""
    clock = ManualClock()
    backend = ScriptedBackend("one two", clock=clock, speeds=SPEEDS)

    async def main():
        async with paceline.AsyncClient(backend=backend, clock=clock, tracing=False) as client:
            for slo in (paceline.SLO(), paceline.SLO(min_quality=0.985), paceline.SLO(adapt=False)):
                async with client.turn(slo=slo) as turn:
                    await turn.generate("hi", max_tokens=4, mix_cache=slo.adapt)

    asyncio.run(main())
    plans = [received.plan for received in backend.received]
    assert [plan.fallback_variants for plan in plans] == [(Variant.INT8, Variant.INT4), (Variant.INT8,), ()]
    assert [plan.mode.mix_cache for plan in plans] == [True, True, False]
