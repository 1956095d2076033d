"""Speculative decoding: cheap proposals of the next tokens, which the target variant verifies in one pass.

Lossless whatever proposes. At each position the target draws its own token, by the stream's own rule and with
that position's own random number, and a draft is accepted where it is that very token. So a stream is the
same, token for token, with and without drafts, for every way of drawing. (Leviathan et al., 2023, and Chen et
al., 2023, accept by the ratio of two probabilities instead, which keeps the distribution but not the tokens.)

``ngram`` and ``self_draft`` make a ``proposal`` · ``acceptance`` and ``costs`` remember what that was worth ·
``length`` says how many drafts pay · ``stream`` is what is known of one stream, with the ``history`` of its
tokens, ``sessions`` what was said before it · ``speculator`` puts them together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from paceline_engine.mode import Speculation, Variant
from paceline_engine.speculate.length import Pace
from paceline_engine.speculate.proposal import Proposal

if TYPE_CHECKING:
    from paceline_engine.model.adapter import Adapter
    from paceline_engine.sampling.rules import DrawRule
    from paceline_engine.speculate.stream import DraftStream


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequest:
    """One stream that may use drafts in this step."""

    stream: DraftStream
    speculation: Speculation
    target: Variant
    """The variant that will verify."""
    token_ids: Sequence[int]
    """Prompt and output so far; the KV of all but the last stands in the blocks."""
    output_ids: Sequence[int]
    rule: DrawRule
    block_table: Sequence[int]
    """Covers ``len(token_ids) + most - 1`` positions."""
    most: int
    """Most draft tokens; at least 1."""
    wanted: Callable[[], bool]
    """False once the stream has been aborted."""
    adapter: Adapter | None = None
    others: tuple[Pace, ...] = ()
    """Of the other streams in the step that have a target."""


class Drafter(Protocol):
    """Proposes the next tokens of several streams at once."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """One proposal a request, in their order; empty where there is nothing to propose."""
        ...
