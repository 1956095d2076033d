from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from paceline_engine.mode import Drafter, Mode, Speculation, Variant
from paceline_policies.pacing import Pacer
from paceline_policies.pacing.governor import govern, needed_s
from paceline_policies.pacing.speeds import Speeds

BOTH = (Variant.INT8, Variant.INT4)


def moves(kit: Any, *streams: Any, now_s: float = 100.0) -> dict[str, Variant]:
    found = govern(kit.state(streams, now_s=now_s), Speeds(kit.numbers()))
    return {move.key.request_id: move.to for move in found}


def test_a_stream_in_time_stays(kit: Any) -> None:
    """Predicted to keep its target and deadline, a stream is left where it is."""
    assert moves(kit, kit.view("a", tpot_target_s=0.06, fallback_variants=BOTH)) == {}
    assert moves(kit, kit.view("a", deadline_at_s=104.0, fallback_variants=BOTH)) == {}


def test_behind_moves_to_the_best_variant_that_catches_up(kit: Any) -> None:
    """Just behind, it takes the next variant; further behind, the one that is fast enough."""
    assert moves(kit, kit.view("a", tpot_target_s=0.045, fallback_variants=BOTH)) == {"a": Variant.INT8}
    assert moves(kit, kit.view("a", tpot_target_s=0.025, fallback_variants=BOTH)) == {"a": Variant.INT4}
    assert moves(kit, kit.view("a", deadline_at_s=102.5, fallback_variants=BOTH)) == {"a": Variant.INT8}


def test_out_of_reach_takes_the_fastest(kit: Any) -> None:
    """Where no variant is fast enough, and where the deadline has passed, the fastest is taken."""
    assert moves(kit, kit.view("a", tpot_target_s=0.001, fallback_variants=BOTH)) == {"a": Variant.INT4}
    assert moves(kit, kit.view("a", deadline_at_s=99.0, fallback_variants=BOTH)) == {"a": Variant.INT4}


def test_only_what_the_plan_allows(kit: Any) -> None:
    """A stream goes no lower than its plan's variants, and nowhere without any or when held."""
    assert moves(kit, kit.view("a", tpot_target_s=0.001, fallback_variants=(Variant.INT8,))) == {
        "a": Variant.INT8
    }
    assert moves(kit, kit.view("a", tpot_target_s=0.001)) == {}
    held = kit.view("a", tpot_target_s=0.001, fallback_variants=BOTH, variant_held=True)
    assert moves(kit, held) == {}


def test_its_own_token_times_count(kit: Any) -> None:
    """A stream whose tokens came late is behind, though its pace alone would do."""
    made = {"output_tokens": 11, "first_token_at_s": 100.0, "tpot_target_s": 0.055}
    in_time = kit.view("a", last_token_at_s=100.5, fallback_variants=BOTH, **made)
    late = kit.view("a", last_token_at_s=101.2, fallback_variants=BOTH, **made)
    assert moves(kit, in_time, now_s=100.5) == {}
    assert moves(kit, late, now_s=101.2) == {"a": Variant.INT8}


def test_streams_of_one_variant_move_together(kit: Any) -> None:
    """One of four would only add a pass to the step; all four are moved, or the one that runs alone."""
    four = [kit.view(name, tpot_target_s=0.045, fallback_variants=BOTH) for name in "abcd"]
    assert moves(kit, *four) == dict.fromkeys("abcd", Variant.INT8)
    beside = [kit.view(name) for name in "xyz"]
    assert moves(kit, four[0], *beside) == {}


def test_ahead_goes_back_after_a_while(kit: Any) -> None:
    """A moved stream comes back to its plan's variant with margin and after its tokens, and not before."""

    def back(target_s: float, output: int) -> dict[str, Variant]:
        stream = kit.view(
            "a",
            variant=Variant.INT4,
            planned=Variant.BF16,
            fallback_variants=BOTH,
            tpot_target_s=target_s,
            output_tokens=output,
            first_token_at_s=100.0 - target_s * (output - 1),
            variant_changes=1,
            variant_since_tokens=4,
        )
        return moves(kit, stream)

    assert back(0.070, 30) == {"a": Variant.BF16}
    assert back(0.055, 30) == {"a": Variant.INT8}
    assert back(0.036, 30) == {}
    assert back(0.070, 19) == {}
    assert back(0.070, 20) == {"a": Variant.BF16}


def test_going_back_makes_nobody_late(kit: Any) -> None:
    """A stream that could afford its plan's variant stays where another beside it could not."""
    rested = kit.view(
        "a",
        variant=Variant.INT4,
        planned=Variant.BF16,
        fallback_variants=BOTH,
        output_tokens=40,
        variant_changes=1,
    )
    tight = kit.view("b", variant=Variant.INT4, tpot_target_s=0.028)
    assert moves(kit, rested) == {"a": Variant.BF16}
    assert moves(kit, rested, tight) == {}


def test_reasons_name_the_numbers(kit: Any) -> None:
    """Each move says what was predicted and what was left, in milliseconds."""
    (move,) = govern(
        kit.state((kit.view("a", tpot_target_s=0.045, fallback_variants=BOTH),)), Speeds(kit.numbers())
    )
    assert move.why == "behind: 51 ms a token predicted, 45 ms left for each"


def test_a_draft_variant_does_not_draft_for_itself(kit: Any) -> None:
    """Moved to the variant that drafts for it, a stream is predicted without drafts."""
    mode = Mode(
        variant=Variant.BF16,
        speculation=Speculation(drafter=Drafter.SELF, max_draft_tokens=4, draft_variant=Variant.INT4),
    )
    stream = kit.view("a", mode=mode)
    speeds = Speeds(kit.numbers())
    assert speeds.tokens_per_step(stream, Variant.BF16) > 1.5
    assert speeds.tokens_per_step(stream, Variant.INT4) == 1.0
    assert speeds.step_s((stream,)) == pytest.approx(0.055 + 4 * 0.021)
    assert speeds.step_s((stream,), variants={stream.key: Variant.INT4}) == pytest.approx(0.021)


def test_needed_time_without_budgets_is_infinite(kit: Any) -> None:
    """Without deadline and target there is nothing to be behind of."""
    assert math.isinf(needed_s(kit.view("a"), 100.0))


def swings(seed: int) -> Callable[[float], float]:
    """A machine whose speed jumps by factors every half second."""
    rng = random.Random(seed)
    levels = [rng.choice([0.5, 0.8, 1.0, 1.3, 2.0, 3.0]) for _ in range(4000)]
    return lambda now_s: levels[int((now_s - 100.0) * 2) % len(levels)]


@pytest.mark.parametrize("seed", range(12))
def test_no_machine_makes_it_flap(kit: Any, seed: int) -> None:
    """However the speed jumps, changes grow with the logarithm of the tokens: a dozen in 2,000."""
    rng = random.Random(seed)
    machine = kit.machine(Pacer(kit.numbers()), truth=kit.numbers(), slow=swings(seed))
    streams = [
        kit.stream(
            kit.view(
                name,
                tpot_target_s=rng.choice([0.03, 0.05, 0.06, 0.08]),
                fallback_variants=BOTH,
                max_tokens=2000,
            )
        )
        for name in "abc"[: 1 + seed % 3]
    ]
    machine.streams = list(streams)
    machine.prompts = [kit.view("p", remaining_tokens=4000)]
    while machine.streams:
        machine.step()
    for stream in streams:
        assert len(stream.moves) <= 12
        ups = [
            place
            for place, (before, after) in enumerate(
                zip([(0, Variant.BF16), *stream.moves], stream.moves, strict=False)
            )
            if list(Variant).index(after[1]) < list(Variant).index(before[1])
        ]
        for place in ups:
            since = stream.moves[place - 1][0]
            assert stream.moves[place][0] - since >= 8 * 2**place


def test_a_slow_spell_is_weathered(kit: Any) -> None:
    """While the machine is twice as slow the stream runs lower, keeps its mean, and ends as planned."""
    machine = kit.machine(
        Pacer(kit.numbers()), truth=kit.numbers(), slow=lambda now: 2.0 if 102 < now < 106 else 1.0
    )
    stream = kit.stream(kit.view("a", tpot_target_s=0.070, fallback_variants=BOTH, max_tokens=400))
    machine.streams = [stream]
    while machine.streams:
        machine.step()
    assert stream.moves[0][1] in BOTH
    assert stream.view.variant is Variant.BF16
    assert (machine.now_s - 100.0) / 399 <= 0.070
