"""The random numbers that drawing uses."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass

_MANTISSA_BITS = 53


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomStream:
    """Uniform numbers that depend on seed, choice and position alone.

    A counter-based generator (the idea of Salmon et al., 2011, with BLAKE2b as the mixing function): no
    state is kept, so neither batch mates, nor preemption, nor drafts that were thrown away shift a draw.
    """

    seed: int
    index: int = 0
    """Which choice of the request."""

    @classmethod
    def for_request(cls, seed: int | None, index: int) -> RandomStream:
        """The stream of one choice; without a seed, of a seed from the operating system."""
        return cls(seed=secrets.randbits(64) if seed is None else seed, index=index)

    def uniform(self, position: int, purpose: str = "draw") -> float:
        """A number in [0, 1) for the output token at ``position``; one for each ``purpose``."""
        counter = f"{self.seed}:{self.index}:{position}:{purpose}".encode()
        word = int.from_bytes(hashlib.blake2b(counter, digest_size=8).digest(), "big")
        return (word >> (64 - _MANTISSA_BITS)) / (1 << _MANTISSA_BITS)
