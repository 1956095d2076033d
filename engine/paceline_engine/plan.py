"""What the policy hands to a backend: a mode, a token cap and a deadline."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline_engine.errors import InvalidValueError
from paceline_engine.mode import Mode, Variant
from paceline_engine.numeric import is_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to run one generation. All times are seconds on the monotonic clock."""

    mode: Mode
    max_tokens: int
    """Most tokens to generate for each choice."""
    deadline_at_s: float | None = None
    """When the whole generation should have ended. Work whose deadline has passed is refused."""
    hard_deadline: bool = False
    """End the generation at the deadline with finish reason ``budget``."""
    first_token_by_s: float | None = None
    """When the first token should be out; orders the queue."""
    tpot_target_s: float | None = None
    """Seconds per output token that a running stream should keep."""
    fallback_variants: tuple[Variant, ...] = ()
    """Variants that a stream may be moved to while it runs behind, best quality first; it may come back
    to its mode's own. Empty: it keeps its variant."""
    stall_limit_s: float | None = None
    """Longest wait for the next token before the generation fails with ``StallError``."""

    def __post_init__(self) -> None:
        if not (is_whole(self.max_tokens) and self.max_tokens >= 1):
            raise InvalidValueError(
                "max_tokens",
                observed=self.max_tokens,
                limit="a whole number, at least 1",
                remedy="use Turn.choose to score options without generating",
            )
        for name in ("deadline_at_s", "first_token_by_s", "tpot_target_s", "stall_limit_s"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise InvalidValueError(
                    name, observed=value, limit="a finite number or None", remedy="use None for no limit"
                )
        if self.hard_deadline and self.deadline_at_s is None:
            raise InvalidValueError(
                "hard_deadline",
                observed=True,
                limit="used with a deadline_at_s",
                remedy="give the plan a deadline",
            )
