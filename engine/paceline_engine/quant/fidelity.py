"""Compares the next-token distributions of variants with those of a reference, on one text."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from paceline_engine.fidelity import Fidelity, FidelityRequest
from paceline_engine.mode import Variant
from paceline_engine.model.base import Logits, ModelRunner, SequenceSlice

_ROWS = 64
"""Tokens of a compared pass: the logits of a large vocabulary take a megabyte each."""
_CONTEXT_ROWS = 256
_COMPARED_ROWS = 4
"""So that what is worked out on the way stays in the caches."""

FidelityPasses = Generator[None, None, dict[Variant, Fidelity]]
"""Yields after each stretch of the text; its value is what was found."""


def blocks_needed(n_tokens: int, runner: ModelRunner) -> int:
    """KV blocks for a text of this length: every variant reads keys and values of its own."""
    return len(runner.variants) * -(-n_tokens // runner.block_size)


def fidelity_passes(runner: ModelRunner, request: FidelityRequest, blocks: Sequence[int]) -> FidelityPasses:
    """Run the text with every variant, a stretch at a time.

    Args:
        request: its ids and reference are the runner's.
        blocks: KV blocks that nobody else uses meanwhile, as many as ``blocks_needed``.
    """
    variants = [request.reference, *(each for each in runner.variants if each is not request.reference)]
    each = len(blocks) // len(variants)
    tables = {variant: blocks[at * each : (at + 1) * each] for at, variant in enumerate(variants)}
    sums = {variant: torch.zeros(3, dtype=torch.float64) for variant in variants}
    ids, at, end = request.token_ids, 0, len(request.token_ids) - 1
    while at < end:
        compared = at >= request.first_compared - 1
        upto = min(at + _ROWS, end) if compared else min(at + _CONTEXT_ROWS, request.first_compared - 1)
        _stretch(runner, ids[at : upto + 1], at, tables, sums if compared else None)
        at = upto
        yield
    return {
        variant: Fidelity(
            n_tokens=len(ids) - request.first_compared,
            logprob=float(found[0]),
            kl_nats=float(found[1]),
            n_agreed=round(float(found[2])),
        )
        for variant, found in sums.items()
    }


@torch.inference_mode()
def _stretch(
    runner: ModelRunner,
    ids: Sequence[int],
    position: int,
    tables: dict[Variant, Sequence[int]],
    sums: dict[Variant, Tensor] | None,
) -> None:
    """Run all of ``ids`` but the last; each predicts the one after it. The reference comes first."""
    expected: tuple[Tensor, Tensor] | None = None
    for variant, table in tables.items():
        part = SequenceSlice(
            token_ids=ids[:-1],
            position=position,
            block_table=table,
            logits=Logits.NONE if sums is None else Logits.ALL,
        )
        logits = runner.forward([part], variant)
        if sums is not None:
            is_reference = expected is None
            if expected is None:
                found = logits.log_softmax(-1)
                expected = found, found.argmax(-1)
            targets = torch.tensor(ids[1:], device=logits.device)
            for start in range(0, len(targets), _COMPARED_ROWS):
                rows = slice(start, start + _COMPARED_ROWS)
                found = expected[0][rows] if is_reference else logits[rows].log_softmax(-1)
                sums[variant] += _compare(found, expected[0][rows], expected[1][rows], targets[rows]).cpu()


def _compare(found: Tensor, expected: Tensor, likeliest: Tensor, targets: Tensor) -> Tensor:
    """Sums over rows of log probabilities [rows, vocab]: log likelihood, divergence of found, agreement.

    ``likeliest`` [rows] is where ``expected`` is largest.
    """
    likelihood = found.gather(1, targets[:, None]).double().sum()
    divergence = (expected.exp() * (expected - found)).sum(-1).double().sum()
    agreement = (found.argmax(-1) == likeliest).double().sum()
    return torch.stack([likelihood, divergence, agreement])
