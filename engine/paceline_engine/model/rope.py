"""Rotary position embedding (Su et al., 2021, https://arxiv.org/abs/2104.09864) and its scalings.

Pairs stand half-split: element i of a head turns with element i + head_dim / 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline_engine.errors import UnsupportedModelError
from paceline_engine.model.spec import RopeSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rope:
    """The frequencies of one RoPE, on one device."""

    frequencies: Tensor
    """fp32 [head_dim / 2]: radians per position."""
    magnitude: float
    """Multiplies cosine and sine (YaRN's attention factor)."""

    @classmethod
    def build(cls, spec: RopeSpec, *, head_dim: int, device: torch.device) -> Rope:
        """The frequencies that ``spec`` describes.

        Raises:
            UnsupportedModelError: a scaling that is not known.
        """
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies = 1.0 / spec.theta**exponents
        if spec.frequency_factors is not None:
            frequencies = frequencies / torch.tensor(spec.frequency_factors, dtype=torch.float32)
        magnitude = 1.0
        match spec.scaling:
            case "default":
                pass
            case "linear":
                frequencies = frequencies / spec.factor
            case "llama3":
                frequencies = _llama3(frequencies, spec)
            case "yarn":
                frequencies = _yarn(frequencies, spec, head_dim)
                magnitude = _yarn_magnitude(spec)
            case unknown:
                raise UnsupportedModelError(
                    "model",
                    reason=f"RoPE scaling '{unknown}' is not read",
                    remedy="use a checkpoint with default, linear, llama3 or yarn scaling",
                )
        return cls(frequencies=frequencies.to(device), magnitude=magnitude)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine, fp32 [T, head_dim / 2] each, for int64 positions [T]."""
        angles = positions[:, None].float() * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        if self.magnitude != 1.0:
            cos, sin = cos * self.magnitude, sin * self.magnitude
        return cos, sin


def _llama3(frequencies: Tensor, spec: RopeSpec) -> Tensor:
    """Llama 3.1's scaling: slow frequencies are divided by the factor, fast ones kept, others blended.

    With wavelength w = 2π / f and original context c: kept where w < c / high, divided where w > c / low,
    and between them ``(1 - s) f / factor + s f`` with ``s = (c / w - low) / (high - low)``.
    """
    turns = spec.original_context * frequencies / (2 * math.pi)
    smooth = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / spec.factor + smooth * frequencies


def _yarn(frequencies: Tensor, spec: RopeSpec, head_dim: int) -> Tensor:
    """YaRN (Peng et al., 2023, https://arxiv.org/abs/2309.00071), "NTK-by-parts".

    Dimensions that turn more than ``beta_fast`` times within the original context are kept, those that
    turn less than ``beta_slow`` times are divided by the factor, with a linear ramp between them.
    """

    def dimension(n_turns: float) -> float:
        ratio = spec.original_context / (n_turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(spec.theta))

    low = max(math.floor(dimension(spec.beta_fast)), 0)
    high = min(math.ceil(dimension(spec.beta_slow)), head_dim - 1)
    width = high - low if high != low else 1e-3
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return frequencies / spec.factor * ramp + frequencies * (1 - ramp)


def _yarn_magnitude(spec: RopeSpec) -> float:
    """The factor that a checkpoint names, or ``0.1 ln(factor) + 1`` as the paper recommends."""
    if spec.attention_factor is not None:
        return spec.attention_factor
    return 0.1 * math.log(spec.factor) + 1.0 if spec.factor > 1 else 1.0
