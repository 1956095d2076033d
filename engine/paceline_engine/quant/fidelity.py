"""How near a variant's next-token distributions are to the reference's, on held text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline_engine.errors import InvalidValueError
from paceline_engine.mode import Variant
from paceline_engine.model.base import Logits, ModelRunner, SequenceSlice

_ROWS = 64
"""Tokens of a pass: the logits of a large vocabulary take a megabyte each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """One variant beside the reference, over all predicted tokens of all windows."""

    perplexity_ratio: float
    """Perplexity of the variant divided by that of the reference."""
    kl_nats: float
    """Mean Kullback-Leibler divergence of the variant from the reference."""
    top1_agreement: float
    """Share of positions at which both find the same token most likely."""
    n_tokens: int


def measure_fidelity(
    runner: ModelRunner, windows: Sequence[Sequence[int]], *, reference: Variant = Variant.BF16
) -> dict[Variant, Fidelity]:
    """Run every variant of the runner over the same windows, each from an empty context.

    Overwrites the runner's KV blocks: nothing else may use it meanwhile.

    Args:
        windows: token ids; each token but the first is predicted from those before it.

    Raises:
        InvalidValueError: no window of at least two tokens, one that does not fit the runner's blocks, or a
            reference that the runner does not have.
    """
    variants = [reference, *(each for each in runner.variants if each is not reference)]
    # Every variant reads keys and values of its own.
    blocks_each = runner.n_blocks // len(variants)
    longest = min(blocks_each * runner.block_size, runner.spec.context_tokens)
    if reference not in runner.variants:
        raise InvalidValueError(
            "reference",
            observed=reference,
            limit=f"one of {', '.join(runner.variants)}",
            remedy="load the variant that the others are compared with",
        )
    if not windows or not all(2 <= len(ids) <= longest for ids in windows):
        raise InvalidValueError(
            "windows",
            observed=[len(ids) for ids in windows][:8],
            limit=f"some windows of 2 to {longest} tokens",
            remedy="cut the text to shorter windows, or give the runner more blocks",
        )
    sums = {variant: torch.zeros(3, dtype=torch.float64) for variant in variants}
    with torch.inference_mode():
        for ids in windows:
            for first in range(0, len(ids) - 1, _ROWS):
                end = min(first + _ROWS, len(ids) - 1)
                targets = torch.tensor(ids[first + 1 : end + 1])
                expected: Tensor | None = None
                for index, variant in enumerate(variants):
                    table = range(index * blocks_each, (index + 1) * blocks_each)
                    rows = SequenceSlice(
                        token_ids=ids[first:end], position=first, block_table=table, logits=Logits.ALL
                    )
                    found = runner.forward([rows], variant).log_softmax(-1)  # [rows, vocab]
                    expected = found if expected is None else expected
                    sums[variant] += _compare(found, expected, targets)
    n_tokens = sum(len(ids) - 1 for ids in windows)
    base = float(sums[reference][0])
    return {
        variant: Fidelity(
            perplexity_ratio=math.exp((float(found[0]) - base) / n_tokens),
            kl_nats=float(found[1]) / n_tokens,
            top1_agreement=float(found[2]) / n_tokens,
            n_tokens=n_tokens,
        )
        for variant, found in sums.items()
    }


def _compare(found: Tensor, expected: Tensor, targets: Tensor) -> Tensor:
    """Sums over rows of log probabilities [rows, vocab]: negative log likelihood, divergence, agreement."""
    targets = targets.to(found.device)
    likelihood = -found.gather(1, targets[:, None]).double().sum()
    divergence = (expected.exp() * (expected - found)).sum(-1).double().sum()
    agreement = (found.argmax(-1) == expected.argmax(-1)).double().sum()
    return torch.stack([likelihood, divergence, agreement]).cpu()
