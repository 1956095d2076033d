"""What a precision costs in answer quality, measured on held text: never assumed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline_engine.errors import InvalidValueError
from paceline_engine.fidelity import Fidelity


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """How near a variant is to the reference on held text."""

    value: float
    """Perplexity of the reference divided by this variant's, in (0, 1]: 1 is the reference, and measured
    gains over it are noise and count as 1."""
    deviation: float = 0.0
    """Standard error of the ratio over the texts."""
    perplexity_ratio: float | None = None
    """Perplexity of this variant divided by the reference's, as measured."""
    kl_nats: float | None = None
    """Mean Kullback-Leibler divergence from the reference, a token."""
    top1_agreement: float | None = None
    """Share of tokens for which both find the same one most likely."""
    n_tokens: int = 0
    """Compared tokens."""

    @property
    def shown(self) -> float:
        """What the measurement shows: one standard error below its value. Decisions count this.

        So a variant whose loss is within the noise does not tie with the reference, to be taken as cheaper.
        """
        return max(0.0, self.value - self.deviation)


def quality(*, reference: Sequence[Fidelity], variant: Sequence[Fidelity]) -> Quality:
    """Quality of a variant from what it and the reference came to on the same texts.

    ln(ppl_variant / ppl_reference) is the difference of the mean log probabilities per token. Its
    standard error is that of a ratio estimate over the paired texts, since their difficulty is common to
    both and cancels (Cochran, Sampling Techniques, 1977, 6.4).

    Raises:
        InvalidValueError: no texts, texts that do not pair, or values that are no log probabilities.
    """
    tokens = [each.n_tokens for each in variant]
    n = len(tokens)
    if not n or min(tokens) < 1 or [each.n_tokens for each in reference] != tokens:
        raise InvalidValueError(
            "variant",
            observed=([each.n_tokens for each in reference][:8], tokens[:8]),
            limit="compared with the reference on the same texts, each of at least one token",
            remedy="compare both on the same texts",
        )
    for each in (*variant, *reference):
        if not (math.isfinite(each.logprob) and each.logprob <= 1e-6 and math.isfinite(each.kl_nats)):
            raise InvalidValueError(
                "variant",
                observed=(each.logprob, each.kl_nats),
                limit="made of finite log probabilities, 0 or less, and finite divergences",
                remedy="the weights of this variant are damaged, or were never fit for it",
            )
    total = sum(tokens)
    losses = [v.logprob - r.logprob for v, r in zip(variant, reference, strict=True)]
    mean = sum(losses) / total
    value = math.exp(min(max(mean, -700.0), 700.0))
    if n == 1:
        # One text tells nothing of its own spread.
        deviation = abs(1.0 - value)
    else:
        errors = [loss - mean * count for loss, count in zip(losses, tokens, strict=True)]
        deviation = value * math.sqrt(n / (n - 1) * sum(error * error for error in errors)) / total
    return Quality(
        value=min(1.0, value),
        deviation=deviation,
        perplexity_ratio=1.0 / value,
        kl_nats=max(0.0, sum(each.kl_nats for each in variant) / total),
        top1_agreement=sum(each.n_agreed for each in variant) / total,
        n_tokens=total,
    )
