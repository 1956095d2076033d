"""Drawing where the logits lie gives the draws of the sampler."""

from __future__ import annotations

import math

import pytest
import torch

from paceline_engine.request import SamplingParams
from paceline_engine.sampling import sampler
from paceline_engine.sampling.device import best_on_device, choose_on_device
from paceline_engine.sampling.draw import RandomStream
from paceline_engine.sampling.rules import DrawRule

PARAMS = [
    {},
    {"top_k": 5},
    {"top_k": 3000},
    {"top_p": 0.8},
    {"top_p": 0.999},
    {"top_p": 1e-9},
    {"min_p": 0.3},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.7, "min_p": 0.1},
    {"temperature": 0.2, "top_p": 0.9},
    {"temperature": 3.0},
]


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_the_same_token_is_drawn(params: dict[str, float], spread: float) -> None:
    """For every filter, flat and steep logits, over 200 positions."""
    given = SamplingParams(**{"temperature": 1.0, **params})  # type: ignore[arg-type]
    rule = DrawRule(given, stream=RandomStream(seed=3))
    logits = torch.randn(2500, generator=torch.Generator().manual_seed(1)) * spread
    best = float(logits.max())
    for position in range(200):
        scaled = (logits - best) / given.temperature
        found = choose_on_device(scaled, given, rule.stream.uniform(position))
        assert found == sampler._draw_by_chance(logits, rule, position, best)


@pytest.mark.parametrize("params", [{}, {"top_p": 0.7}, {"top_k": 2}])
def test_a_number_at_its_end_draws_a_token_that_has_a_weight(params: dict[str, float]) -> None:
    """Where rounding puts the target on the total, the last token with a weight is drawn, no other."""
    given = SamplingParams(temperature=1.0, **params)  # type: ignore[arg-type]
    scaled = torch.tensor([-math.inf, 0.0, -0.5, -math.inf])
    assert choose_on_device(scaled, given, 1.0) == 2
    assert choose_on_device(scaled, given, 0.0) == 1


def test_the_best_of_each_row() -> None:
    """All rows or some, with NaN and infinities, as the sampler finds them."""
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(2))
    logits[1, 7], logits[2, 9] = math.nan, math.inf
    for rows in ([0, 1, 2, 3], [3], [1, 2]):
        found, expected = best_on_device(logits, rows), sampler._best(logits, rows)
        assert found.keys() == expected.keys()
        for row in rows:
            assert found[row][0] == expected[row][0]
            assert found[row][1] == expected[row][1] or math.isnan(expected[row][1])
