"""Drafts of one stream beside others that have a pace to keep, on a clock that the passes move."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from paceline_engine.mode import Drafter, Speculation, Variant

MakeBench = Callable[..., Any]

SELF = Speculation(drafter=Drafter.SELF, max_draft_tokens=6, draft_variant=Variant.INT4)
NGRAM = Speculation(drafter=Drafter.NGRAM, max_draft_tokens=6)
PASS_S, DRAFT_S, TOKEN_S = 0.050, 0.008, 0.004


@pytest.fixture
def make_timed(make_bench: MakeBench) -> MakeBench:
    """A bench whose drafts are always right, and whose passes take longer the more tokens they have."""

    def make() -> Any:
        bench = make_bench(n_blocks=200)
        bench.clock.tick_s = 0.0
        runner, forward = bench.runner, bench.runner.forward

        def timed(slices: Any, variant: Variant, **options: Any) -> Any:
            n_tokens = sum(len(part.token_ids) for part in slices)
            bench.clock.now_s += (DRAFT_S if options else PASS_S) + TOKEN_S * (n_tokens - 1)
            return forward(slices, variant, **options)

        runner.forward = timed
        runner.change_row = lambda seen, logits: logits.__setitem__(
            int(seen[-4 if len(seen) > 3 else 0]), 99.0
        )
        return bench

    return make


def gaps(bench: Any, name: str) -> list[float]:
    times = [chunk.made_at_s for chunk in bench.out.chunks[name]]
    return [after - before for before, after in itertools.pairwise(times)]


@pytest.mark.parametrize("speculation", [SELF, NGRAM], ids=["self", "ngram"])
@pytest.mark.parametrize("target_s", [0.06, 0.066])
def test_a_stream_keeps_its_pace_beside_one_that_drafts(
    make_timed: MakeBench, speculation: Speculation, target_s: float
) -> None:
    """Drafts fill the time that the other stream leaves, and all of it once that has ended."""
    bench = make_timed()
    bench.submit("paced", [1, 2, 3], bench.plan(40, tpot_target_s=target_s))
    bench.submit("drafting", [5, 6, 7, 8, 5, 6, 7, 8], bench.plan(400, speculation=speculation))
    bench.step(8)  # what passes and drafts cost is found out
    n_known = len(bench.out.chunks["paced"])
    bench.run()
    assert max(gaps(bench, "paced")[n_known:]) <= target_s * 1.02
    ended_at_s = bench.out.chunks["paced"][-1].made_at_s
    known_at_s = bench.out.chunks["paced"][n_known].made_at_s
    sizes = [(chunk.made_at_s, len(chunk.token_ids)) for chunk in bench.out.chunks["drafting"]]
    beside = [size for at_s, size in sizes if known_at_s < at_s <= ended_at_s]
    alone = [size for at_s, size in sizes if at_s > ended_at_s]
    assert max(alone) == 7
    assert sum(beside) / len(beside) < 0.8 * sum(alone) / len(alone)
    if target_s > 0.062:
        assert max(beside) > 1


def test_without_a_target_drafts_are_as_long_as_pays(make_timed: MakeBench) -> None:
    """A stream that has no pace to keep limits nobody."""
    bench = make_timed()
    bench.submit("free", [1, 2, 3], bench.plan(40))
    bench.submit("drafting", [5, 6, 7, 8, 5, 6, 7, 8], bench.plan(200, speculation=SELF))
    bench.run()
    assert max(len(chunk.token_ids) for chunk in bench.out.chunks["drafting"][5:35]) == 7


def test_streams_that_are_late_draft_beside_one_another(make_timed: MakeBench) -> None:
    """Where plain steps break the targets of streams that all draft, drafts may still save them."""
    bench = make_timed()
    for name in "ab":
        plan = bench.plan(120, speculation=SELF, tpot_target_s=0.04)
        bench.submit(name, [5, 6, 7, 8, 5, 6, 7, 8], plan)
    out = bench.run()
    for name in "ab":
        tpot_ms = out.finish(name).timeline.tpot_ms()
        assert tpot_ms is not None
        assert tpot_ms < 40
