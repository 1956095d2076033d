from __future__ import annotations

import math
import random

import pytest

from paceline_engine.errors import InvalidValueError
from paceline_policies.quality import Quality, quality


def test_ratio_of_perplexities() -> None:
    """Quality is the reference's perplexity over the variant's, over all tokens."""
    found = quality(reference=[-100.0, -220.0], variant=[-110.0, -232.0], tokens=[50, 100])
    assert found.value == pytest.approx(math.exp(-22 / 150))
    assert found.deviation > 0


def test_reference_is_one_and_gains_are_noise() -> None:
    """The reference against itself is exactly 1; a variant that looks better counts as 1."""
    same = quality(reference=[-5.0, -6.0], variant=[-5.0, -6.0], tokens=[3, 3])
    assert (same.value, same.deviation) == (1.0, 0.0)
    assert quality(reference=[-5.0, -6.0], variant=[-4.0, -5.0], tokens=[3, 3]).value == 1.0


def test_deviation_is_honest() -> None:
    """Over many draws the truth lies within two deviations about 95 times in 100."""
    rng = random.Random(0)
    hits = 0
    for _ in range(300):
        tokens = [rng.randint(50, 100) for _ in range(40)]
        reference = [-3.0 * n + rng.gauss(0, 20) for n in tokens]
        variant = [r - 0.05 * n + rng.gauss(0, 2) for r, n in zip(reference, tokens, strict=True)]
        found = quality(reference=reference, variant=variant, tokens=tokens)
        hits += abs(found.value - math.exp(-0.05)) <= 2 * found.deviation
    assert 0.9 <= hits / 300 <= 0.99


def test_hopeless_variant_stays_above_zero() -> None:
    """However bad the variant, its quality is a positive number; one window alone is uncertain."""
    found = quality(reference=[-1.0], variant=[-1e9], tokens=[1])
    assert 0 < found.value < 1e-100
    assert found.deviation == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("reference", "variant", "tokens"),
    [
        ([], [], []),
        ([-1.0], [-1.0, -2.0], [1]),
        ([-1.0], [-1.0], [0]),
        ([-1.0], [math.nan], [1]),
        ([-math.inf], [-1.0], [1]),
        ([-1.0], [0.5], [1]),
    ],
)
def test_nonsense_is_refused(reference: list[float], variant: list[float], tokens: list[int]) -> None:
    """Windows that do not pair, or values that are no log probabilities, are refused."""
    with pytest.raises(InvalidValueError):
        quality(reference=reference, variant=variant, tokens=tokens)


def test_a_loss_within_the_noise_is_not_taken_for_equal() -> None:
    """What counts in decisions is one standard error below the value, and never below 0."""
    assert Quality(value=1.0, deviation=0.003).shown == pytest.approx(0.997)
    assert Quality(value=1.0).shown == 1.0
    assert Quality(value=0.1, deviation=0.4).shown == 0.0
