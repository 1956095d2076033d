"""The parts of the benchmark of modes, on a tiny model in this process; its figures say nothing of speed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.bench import modes, modes_drafts, modes_quality
from paceline.cli.bench.modes_base import ModesBench
from paceline.measured import Measured
from paceline_engine.backends.embedded import EmbeddedBackend, EmbeddedConfig
from paceline_engine.chunk import TokenLogprob
from paceline_engine.mode import Mode, Variant
from paceline_engine.timeline import Timeline

REPEATS = 3
"""Of the phrase that each conversation's instructions are made of."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(modes, "NEW_TOKENS", (4, 20))
    monkeypatch.setattr(modes, "PREFIX_TOKENS", 60)
    monkeypatch.setattr(modes, "BATCHES", (1, 8))
    monkeypatch.setattr(modes_drafts, "STREAM_TOKENS", 24)
    monkeypatch.setattr(modes_quality, "WINDOW_TOKENS", 48)


@pytest.fixture
def run(tiny_folder: Path) -> Callable[[Callable[[ModesBench], Awaitable[object]]], ModesBench]:
    """Runs a part of the benchmark; gives what it found."""

    def call(part: Callable[[ModesBench], Awaitable[object]]) -> ModesBench:
        async def main() -> ModesBench:
            config = EmbeddedConfig(
                model=str(tiny_folder), variants=modes.VARIANTS, host="thread", n_threads=1, kv_tokens=4096
            )
            backend = EmbeddedBackend(config)
            try:
                bench = ModesBench(backend=backend, info=await backend.start(), quick=True)
                await part(bench)
            finally:
                await backend.aclose()
            return bench

        return asyncio.run(main())

    return call


def test_prefill_prefix_and_decode_are_measured_for_every_variant(run) -> None:
    """Each figure is there for each variant, with bytes and speeds, and the goals beside them."""

    async def speed(bench: ModesBench) -> None:
        await modes.measure_prefill(bench)
        await modes.measure_prefix(bench)
        await modes.measure_decode(bench)

    bench = run(speed)
    for variant in modes.VARIANTS:
        for figure in ("ttft_4", "ttft_20", "ttft_cached_60", "tpot_batch_1", "tpot_batch_8"):
            row = bench.results[f"{variant}_{figure}"]
            assert 0 < row["minimum"] <= row["median"] <= row["maximum"]
        read = bench.results[f"{variant}_weights_read"]
        assert read["value"] == bench.info.bytes_per_variant[variant]
        assert read["machine_gb_per_s"] > 0
    names = {goal.name for goal in bench.goals}
    assert names == {f"{each}_prefix_speedup" for each in modes.VARIANTS} | {"int8_throughput_batch_8"}


def test_drafted_streams_are_compared_with_plain_ones(run, conversations: Path) -> None:
    """Every drafter of every target has its TPOT and acceptance, and no stream was changed by drafting."""
    bench = run(lambda bench: modes_drafts.measure_drafts(bench, conversations))
    for label in ("bf16", "bf16+int4x4", "bf16+ngramx8", "int8", "int8+int4x4", "int8+ngramx8"):
        assert bench.results[f"{label}_tpot_stream"]["n"] == 2
    assert 0 <= bench.results["bf16+int4x4_tpot_stream"]["acceptance"] <= 1
    assert bench.results["identical_streams"]["n"] == 8
    goals = {goal.name: goal for goal in bench.goals}
    assert goals["lossless_streams"].met
    assert {"self_speedup", "best_drafter_speedup"} <= set(goals)


def test_every_variant_s_quality_is_measured_on_the_conversations(run, conversations: Path) -> None:
    """The reference is itself, the others are near it, and each has its goal."""
    bench = run(lambda bench: modes_quality.measure_fidelity(bench, conversations))
    reference = bench.results["bf16_quality"]
    assert (reference["value"], reference["kl_nats"], reference["top1_agreement"]) == (1.0, 0.0, 1.0)
    assert reference["n_tokens"] == 47
    assert 0 < bench.results["int8_quality"]["kl_nats"] < bench.results["int4_quality"]["kl_nats"]
    assert {goal.name: goal.goal for goal in bench.goals} == {
        "fp8_perplexity_ratio": 1.015,
        "int8_perplexity_ratio": 1.005,
        "int4_perplexity_ratio": 1.10,
    }


def test_windows_are_of_one_size_and_show_the_instructions_once(run, conversations: Path) -> None:
    """Each begins with the conversations' first token; what all conversations begin with comes once."""
    found: list[Any] = []

    async def cut(bench: ModesBench) -> None:
        found.extend(await modes_quality.dialogue_windows(bench.backend, conversations, n=99, size=40))
        first = await bench.backend.prepare([{"role": "system", "content": "Answer travellers. "}])
        found.append(first.token_ids)

    run(cut)
    *windows, first = found
    assert {len(each.token_ids) for each in windows} == {40}
    assert {each.token_ids[0] for each in windows} == {first[0]}
    phrase = bytes(first[8:24])
    shown = sum(bytes(min(each, 255) for each in window.token_ids).count(phrase) for window in windows)
    assert 1 <= shown <= REPEATS, "the instructions of the first conversation alone"


def stream(choices: list[tuple[tuple[int, float], ...]]) -> Measured:
    """A stream whose positions had these likeliest tokens, of which the first was drawn."""
    logprobs = [
        TokenLogprob(token_id=top[0][0], text="", logprob=top[0][1], top=tuple((t, "", p) for t, p in top))
        for top in choices
    ]
    line = Timeline(mode=Mode(variant=Variant.BF16), submitted_at_s=0.0)
    return Measured(timeline=line, token_ids=tuple(e.token_id for e in logprobs), logprobs=tuple(logprobs))


@pytest.mark.parametrize(
    ("gap", "within"), [(0.001, True), (0.02, False)], ids=["equally likely", "clearly less likely"]
)
def test_a_difference_counts_as_rounding_only_where_it_is_shown_to_be(
    gap: float, within: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gap between the two likeliest tokens is held against what the same tokens moved elsewhere."""
    sure = ((5, -0.1), (6, -2.5))
    plain = stream([sure, ((7, -0.7), (8, -0.7 - gap))])
    drafted = stream([((5, -0.101), (6, -2.499)), ((8, -0.7), (7, -0.7 - 0.0001))])
    runs = iter((plain, drafted))

    async def replay(*_args: object, **_options: object) -> Measured:
        return next(runs)

    monkeypatch.setattr(modes_drafts, "run_measured", replay)
    bench: Any = type("Bench", (), {"backend": None})()
    mode = Mode(variant=Variant.BF16)
    prompt: Any = None
    found = asyncio.run(modes_drafts.difference(bench, prompt, mode, mode, at=1))
    assert math.isclose(found["gap_nats"], gap, rel_tol=1e-6)
    assert found["within_rounding"] is within


def test_the_first_difference_of_two_streams() -> None:
    """It is where they part, or where the shorter ends."""
    assert modes_drafts.n_common((1, 2, 3), (1, 2, 4)) == 2
    assert modes_drafts.n_common((1, 2), (1, 2, 4)) == 2
