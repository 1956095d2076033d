"""Captured decode steps, with a capture that only remembers what to call."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline_engine.cuda.graphs import DecodeGraphs, DecodeInputs, Sizes
from paceline_engine.model.base import SequenceSlice

SCRATCH = 90


def call_again(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """What a capture does, without a device: the work runs again on the same buffers."""
    work()
    return work


def row(token: int, position: int, *blocks: int) -> SequenceSlice:
    return SequenceSlice(token_ids=(token,), position=position, block_table=blocks)


class Recorder:
    """A step that gives each row's inputs back."""

    def __init__(self) -> None:
        self.inputs: list[tuple[str, DecodeInputs]] = []
        self.result: Tensor | None = None

    def __call__(self, key: str, inputs: DecodeInputs) -> Tensor:
        self.inputs.append((key, inputs))
        rows = torch.stack([inputs.token_ids, inputs.positions, inputs.slots], dim=-1)
        self.result = torch.cat([rows, inputs.block_tables], dim=-1).float()
        return self.result


def graphs(step: Any, *, capture: Any = call_again, sizes: Sizes | None = None) -> DecodeGraphs[str]:
    return DecodeGraphs(
        step,
        sizes=sizes or Sizes(n_sequences=(1, 2, 4), n_blocks=(2, 8), most_gathered_blocks=16),
        block_size=4,
        scratch_block=SCRATCH,
        device=torch.device("cpu"),
        capture=capture,
    )


def test_sizes_grow_to_their_limits_and_end_at_them() -> None:
    """Sequences double, tables grow by four from 512 tokens, and the last of each is the limit itself."""
    sizes = Sizes.of(max_sequences=12, max_blocks=700, block_size=16, most_gathered_blocks=1400)
    assert sizes.n_sequences == (1, 2, 4, 8, 12)
    assert sizes.n_blocks == (32, 128, 512, 700)
    assert Sizes.of(max_sequences=1, max_blocks=3, block_size=16, most_gathered_blocks=9).n_blocks == (3,)


@pytest.mark.parametrize(
    ("n_sequences", "n_blocks", "shape"),
    [
        (1, 1, (1, 2)),
        (2, 2, (2, 2)),
        (3, 3, None),
        (3, 2, (4, 2)),
        (2, 3, (2, 8)),
        (5, 1, None),
        (1, 9, None),
    ],
)
def test_a_pass_takes_the_smallest_shape_that_holds_it(
    n_sequences: int, n_blocks: int, shape: tuple[int, int] | None
) -> None:
    """Too many rows, too long a table, or too much to gather: none does."""
    sizes = Sizes(n_sequences=(1, 2, 4), n_blocks=(2, 8), most_gathered_blocks=16)
    assert sizes.fit(n_sequences, n_blocks) == shape
    assert shape is None or shape in sizes.all()


def test_every_shape_is_captured_once_the_largest_first() -> None:
    """Captures are as many as shapes that may be gathered, for each variant."""
    step = Recorder()
    made = graphs(step)
    assert made.capture_all("a")
    assert made.n_captured == 5
    gathered = [inputs.block_tables.numel() for _, inputs in step.inputs]
    assert gathered == sorted(gathered, reverse=True)
    assert max(gathered) == 16
    made.capture_all("b")
    assert made.n_captured == 10


def test_a_replay_sees_its_own_rows_and_padding_writes_to_scratch() -> None:
    """Token, position, slot and table of each row; what fills up stands in the scratch block."""
    step = Recorder()
    made = graphs(step)
    made.capture_all("a")
    step.inputs.clear()
    found = made.run("a", [row(7, 5, 11, 12), row(8, 3, 20, 21), row(9, 0, 30)])
    assert found is not None
    assert found.tolist() == [
        [7, 5, 12 * 4 + 1, 11, 12],
        [8, 3, 20 * 4 + 3, 20, SCRATCH],
        [9, 0, 30 * 4, 30, SCRATCH],
    ]
    ((key, inputs),) = step.inputs
    assert key == "a"
    assert inputs.token_ids.tolist() == [7, 8, 9, 0]
    assert inputs.positions.tolist() == [5, 3, 0, 0]
    assert inputs.slots[3] == SCRATCH * 4
    assert inputs.block_tables[3].tolist() == [SCRATCH, SCRATCH]


def test_nothing_of_one_replay_is_left_in_the_next() -> None:
    """A shorter table after a longer one holds none of its blocks, and results are copies."""
    step = Recorder()
    made = graphs(step)
    made.capture_all("a")
    first = made.run("a", [row(1, 30, *range(8)), row(2, 31, *range(10, 18))])
    assert first is not None
    before = first.clone()
    second = made.run("a", [row(3, 9, 50, 51, 52), row(4, 0, 60)])
    assert second is not None
    assert second[1].tolist() == [4, 0, 240, 60, *[SCRATCH] * 7]
    assert step.result is not None
    step.result.zero_()
    torch.testing.assert_close(first, before)


def test_a_pass_that_nothing_holds_is_left_to_others() -> None:
    """Unknown variants, long contexts and forgotten captures give None."""
    made = graphs(Recorder())
    made.capture_all("a")
    assert made.run("b", [row(1, 0, 1)]) is None
    assert made.run("a", [row(1, 32, *range(9))]) is None
    assert made.run("a", [row(1, 0, 1)] * 5) is None
    made.forget()
    assert made.n_captured == 0
    assert made.run("a", [row(1, 0, 1)]) is None


def test_what_cannot_be_captured_runs_uncaptured(caplog: pytest.LogCaptureFixture) -> None:
    """A capture that fails is reported, and what was captured before is kept."""
    seen: list[int] = []

    def capture(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        seen.append(1)
        if len(seen) > 2:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return work

    made = graphs(Recorder(), capture=capture)
    with caplog.at_level(logging.WARNING):
        assert not made.capture_all("a")
    assert made.n_captured == 2
    assert "not permitted" in caplog.text
    assert "more" not in caplog.text
    assert made.run("a", [row(1, 0, 1)]) is None
