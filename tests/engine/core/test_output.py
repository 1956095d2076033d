from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from paceline_engine.chunk import FinishReason
from paceline_engine.core.output import Output
from paceline_engine.sampling.sampler import Drawn

MakeOutput = Callable[..., Output]


@pytest.fixture
def make_output(make_bench: Callable[..., Any]) -> MakeOutput:
    def make(max_tokens: int = 99, end_ids: Sequence[int] = (), **fields: Any) -> Output:
        return Output(make_bench().tokenizer, max_tokens=max_tokens, end_ids=end_ids, **fields)

    return make


def drawn(ids: Sequence[int]) -> list[Drawn]:
    return [Drawn(token_id=token_id) for token_id in ids]


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("ids", "cap", "reason", "count"),
    [
        ([10, 11, 30, 20, 21, 22], 5, FinishReason.STOP, 3),
        ([10, 11, 30, 20], 3, FinishReason.STOP, 3),
        ([10, 11, 12, 30], 3, FinishReason.LENGTH, 3),
        ([30, 10], 5, FinishReason.STOP, 1),
        ([10, 11, 12, 13, 14, 15, 30], 5, FinishReason.LENGTH, 5),
    ],
)
def test_stop_and_cap(
    make_output: MakeOutput, ids: list[int], cap: int, reason: FinishReason, count: int, at_once: bool
) -> None:
    """Accepted at once or one by one, the first of end token and cap ends it; the end token counts."""
    output = make_output(cap, end_ids=(30,))
    for part in [ids] if at_once else [[token_id] for token_id in ids]:
        if output.ending is None:
            output.accept(drawn(part))
    assert output.ending is not None
    assert output.ending.reason is reason
    assert output.token_ids == ids[:count]
    assert output.text == "".join(chr(65 + token_id) for token_id in ids[:count] if token_id != 30)


def test_text_held_back_comes_with_the_end(make_output: MakeOutput) -> None:
    """Text that might have become a stop string is sent when the output ends another way."""
    output = make_output(end_ids=(30,), stop=("BCD",))
    assert output.accept(drawn([0, 1, 2])).text == "A"
    assert output.accept(drawn([30])).text == "BC"
    output = make_output(stop=("BCD",))
    output.accept(drawn([1]))
    assert output.end(FinishReason.BUDGET).text == "B"
    output = make_output(2, stop=("BCD",))
    assert output.accept(drawn([1, 2])).text == "BC"


def test_stop_strings_wait_for_min_tokens(make_output: MakeOutput) -> None:
    """A stop string that is complete before min_tokens is text like any other."""
    output = make_output(stop=("B",), min_tokens=4)
    assert output.accept(drawn([1, 0, 1])).text == "BAB"
    piece = output.accept(drawn([1, 0]))
    assert piece.token_ids == (1,)
    assert piece.ending is not None
    assert piece.ending.stop_text == "B"
    assert output.text == "BAB"


def test_a_stop_in_the_middle_of_accepted_tokens(make_output: MakeOutput) -> None:
    """Tokens after the one that completes a stop string are dropped."""
    output = make_output(stop=("BC",))
    piece = output.accept(drawn([0, 1, 2, 3, 4]))
    assert (piece.text, piece.token_ids) == ("A", (0, 1, 2))
