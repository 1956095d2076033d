"""What a precision costs in answer quality, measured on held text: never assumed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline_engine.errors import InvalidValueError


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Perplexity of the reference variant divided by this variant's: 1 is the reference."""

    value: float
    """In (0, 1]: measured gains over the reference are noise and count as 1."""
    deviation: float = 0.0
    """Standard error of the ratio over the windows."""

    @property
    def shown(self) -> float:
        """What the measurement shows: one standard error below its value. Decisions count this.

        So a variant whose loss is within the noise does not tie with the reference, to be taken as cheaper.
        """
        return max(0.0, self.value - self.deviation)


def quality(*, reference: Sequence[float], variant: Sequence[float], tokens: Sequence[int]) -> Quality:
    """Quality of a variant from the log probabilities that it gives to the same text as the reference.

    ln(ppl_reference / ppl_variant) is the difference of the mean log probabilities per token. Its
    standard error is that of a ratio estimate over the paired windows, since the windows' difficulty
    is common to both and cancels (Cochran, Sampling Techniques, 1977, 6.4).

    Args:
        reference: sum of the natural log probabilities of each window under the reference variant.
        variant: the same windows under the variant.
        tokens: predicted tokens in each window.

    Raises:
        InvalidValueError: no windows, windows that do not pair, or log probabilities above 0.
    """
    n = len(tokens)
    if not n or len(reference) != n or len(variant) != n or min(tokens) < 1:
        raise InvalidValueError(
            "tokens",
            observed=(len(reference), len(variant), list(tokens[:8])),
            limit="one count of at least 1 for each window of both variants",
            remedy="score the same non-empty windows with both",
        )
    if not all(math.isfinite(each) and each <= 1e-6 for each in (*reference, *variant)):
        raise InvalidValueError(
            "variant",
            observed=next(e for e in (*variant, *reference) if not (math.isfinite(e) and e <= 1e-6)),
            limit="made of finite log probabilities, 0 or less",
            remedy="pass sums of natural log probabilities",
        )
    total = sum(tokens)
    mean = sum(v - r for v, r in zip(variant, reference, strict=True)) / total
    value = math.exp(max(mean, -700.0))
    if n == 1:
        # One window tells nothing of its own spread.
        return Quality(value=min(1.0, value), deviation=abs(1.0 - value))
    errors = [v - r - mean * count for v, r, count in zip(variant, reference, tokens, strict=True)]
    variance = n / (n - 1) * sum(error * error for error in errors) / total**2
    return Quality(value=min(1.0, value), deviation=value * math.sqrt(variance))
