from __future__ import annotations

import math
import random

import pytest

from paceline_engine.errors import InvalidValueError
from paceline_engine.fidelity import Fidelity
from paceline_policies.quality import Quality, quality


def texts(logprobs, tokens, *, kl_nats=0.0, n_agreed=0):
    return [
        Fidelity(n_tokens=n, logprob=each, kl_nats=kl_nats, n_agreed=n_agreed)
        for n, each in zip(tokens, logprobs, strict=True)
    ]


def found(reference, variant, tokens):
    return quality(reference=texts(reference, tokens), variant=texts(variant, tokens))


def test_ratio_of_perplexities() -> None:
    """Quality is the reference's perplexity over the variant's, over all tokens."""
    measured = found([-100.0, -220.0], [-110.0, -232.0], [50, 100])
    assert measured.value == pytest.approx(math.exp(-22 / 150))
    assert measured.perplexity_ratio == pytest.approx(math.exp(22 / 150))
    assert measured.deviation > 0
    assert measured.n_tokens == 150


def test_divergence_and_agreement_are_means_over_the_tokens() -> None:
    """Both are shares of all compared tokens, not of texts."""
    variant = texts([-5.0], [10], kl_nats=0.2, n_agreed=9) + texts([-9.0], [30], kl_nats=0.4, n_agreed=21)
    measured = quality(reference=texts([-5.0, -9.0], [10, 30]), variant=variant)
    assert measured.kl_nats == pytest.approx(0.6 / 40)
    assert measured.top1_agreement == pytest.approx(0.75)


def test_reference_is_one_and_gains_are_noise() -> None:
    """The reference against itself is exactly 1; a variant that looks better counts as 1."""
    same = found([-5.0, -6.0], [-5.0, -6.0], [3, 3])
    assert (same.value, same.deviation, same.perplexity_ratio) == (1.0, 0.0, 1.0)
    better = found([-5.0, -6.0], [-4.0, -5.0], [3, 3])
    assert better.value == 1.0
    assert better.perplexity_ratio is not None
    assert better.perplexity_ratio < 1


def test_deviation_is_honest() -> None:
    """Over many draws the truth lies within two deviations about 95 times in 100."""
    rng = random.Random(0)
    hits = 0
    for _ in range(300):
        tokens = [rng.randint(50, 100) for _ in range(40)]
        reference = [-3.0 * n + rng.gauss(0, 20) for n in tokens]
        variant = [r - 0.05 * n + rng.gauss(0, 2) for r, n in zip(reference, tokens, strict=True)]
        measured = found(reference, variant, tokens)
        hits += abs(measured.value - math.exp(-0.05)) <= 2 * measured.deviation
    assert 0.9 <= hits / 300 <= 0.99


def test_hopeless_variant_stays_above_zero() -> None:
    """However bad the variant, its quality is a positive number; one text alone is uncertain."""
    measured = found([-1.0], [-1e9], [1])
    assert 0 < measured.value < 1e-100
    assert measured.deviation == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("reference", "variant"),
    [
        ([], []),
        (texts([-1.0], [1]), texts([-1.0, -2.0], [1, 1])),
        (texts([-1.0], [2]), texts([-1.0], [1])),
        (texts([-1.0], [0]), texts([-1.0], [0])),
        (texts([-1.0], [1]), texts([math.nan], [1])),
        (texts([-math.inf], [1]), texts([-1.0], [1])),
        (texts([-1.0], [1]), texts([0.5], [1])),
        (texts([-1.0], [1]), texts([-1.0], [1], kl_nats=math.nan)),
    ],
)
def test_nonsense_is_refused(reference: list[Fidelity], variant: list[Fidelity]) -> None:
    """Texts that do not pair, or values that are no log probabilities, are refused."""
    with pytest.raises(InvalidValueError):
        quality(reference=reference, variant=variant)


def test_a_loss_within_the_noise_is_not_taken_for_equal() -> None:
    """What counts in decisions is one standard error below the value, and never below 0."""
    assert Quality(value=1.0, deviation=0.003).shown == pytest.approx(0.997)
    assert Quality(value=1.0).shown == 1.0
    assert Quality(value=0.1, deviation=0.4).shown == 0.0
