from __future__ import annotations

from paceline_engine.mode import Mode, Variant
from paceline_engine.plan import Plan
from paceline_engine.schedule.base import SequenceKey, SequenceView, StepState
from paceline_engine.schedule.default import EarliestFirst


def view(name: str, arrival: int, **times: float) -> SequenceView:
    return SequenceView(
        key=SequenceKey(request_id=name, index=0),
        plan=Plan(mode=Mode(variant=Variant.BF16), max_tokens=4, **times),  # type: ignore[arg-type]
        variant=Variant.BF16,
        submitted_at_s=0.0,
        arrival=arrival,
        computed_tokens=0,
        remaining_tokens=10,
        output_tokens=0,
    )


def test_earliest_first() -> None:
    """First token due, then deadline, then arrival; a missing time is the least urgent."""
    state = StepState(
        now_s=0.0,
        decoding=(),
        prefilling=(
            view("e", 5),
            view("d", 4),
            view("c", 3, deadline_at_s=9.0),
            view("b", 2, first_token_by_s=2.0),
            view("a", 1, first_token_by_s=2.0, deadline_at_s=8.0),
        ),
        free_blocks=1,
        block_size=4,
        max_prefill_tokens=7,
    )
    decision = EarliestFirst().decide_step(state)
    assert [key.request_id for key in decision.prefill_order] == ["a", "b", "c", "d", "e"]
    assert decision.prefill_tokens == 7
    assert not decision.variants
