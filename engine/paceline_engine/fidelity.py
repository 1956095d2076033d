"""How near variants are to a reference on one stretch of text: what is asked, and what is found."""

from __future__ import annotations

from dataclasses import dataclass

from paceline_engine.errors import InvalidValueError
from paceline_engine.mode import Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class FidelityRequest:
    """Run a text with every variant, each from an empty context, and compare what they expect next."""

    id: str
    token_ids: tuple[int, ...]
    reference: Variant
    """The variant that the others are compared with."""
    first_compared: int = 1
    """The first token whose prediction is compared; those before it are context alone."""

    def __post_init__(self) -> None:
        if not 1 <= self.first_compared < len(self.token_ids):
            raise InvalidValueError(
                "first_compared",
                observed=self.first_compared,
                limit=f"from 1 to {len(self.token_ids) - 1}, the last of {len(self.token_ids)} tokens",
                remedy="each compared token is predicted from those before it: give at least two",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """Sums over the compared tokens of one text, of one variant."""

    n_tokens: int
    logprob: float
    """Natural logarithm of the text's probability."""
    kl_nats: float
    """Kullback-Leibler divergence of the variant's distributions from the reference's."""
    n_agreed: int
    """Tokens for which variant and reference find the same one most likely."""
