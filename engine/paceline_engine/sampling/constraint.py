"""What a rule asks of the outside about the tokens that it may draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class ConstraintFault(Exception):
    """The constraint cannot say what may come next; the message says why."""


class Constraint(Protocol):
    """Limits what may be drawn. Every answer depends on the output given alone, never on earlier calls.

    So one constraint serves drafting and verifying too: give it the output with the drafts before the
    position in question, in any order of positions, and again from an earlier one after drafts were thrown
    away. After a draft that is not allowed there is nothing to say: the mask then changes nothing, and
    what is drawn there is thrown away with that draft.
    """

    def mask(self, logits: torch.Tensor, output_ids: Sequence[int]) -> None:
        """Set the logits [vocab] of what may not follow ``output_ids`` to minus infinity, in place.

        Raises:
            ConstraintFault: it cannot be known.
        """
        ...

    def admits(self, output_ids: Sequence[int], token_id: int) -> bool:
        """Whether the output can still come to its end after this token, which the mask left in.

        Asked of drawn tokens alone, because it costs more than the mask.
        """
        ...

    def way_out(self, output_ids: Sequence[int]) -> int | None:
        """The next token of the shortest known way to the end, for where drawn ones are not admitted."""
        ...
