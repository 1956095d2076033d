"""The budgets of a turn, the confidence wanted, and what to do when they cannot be met."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline_engine.errors import InvalidValueError
from paceline_engine.numeric import is_finite, is_number, plain_number
from paceline_policies.slo_text import format_fields, parse_fields

OnInfeasible = Literal["degrade", "shorten", "reject"]

_TTFT_MS = 200.0
_TPOT_MS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SLO:
    """Service-level objective of one turn: its budgets in milliseconds. None leaves a budget out.

    A budget is an objective: a miss is reported and the text goes on, unless ``hard``.

    Budgets that cannot all matter are refused: no part of a turn may have more time than the turn, and
    ``stall_ms`` must not end a generation before ``ttft_ms`` or ``tpot_ms`` is missed. Only the defaults of
    ``ttft_ms`` and ``tpot_ms`` give way: ``SLO(e2e_ms=100)`` has a ``ttft_ms`` of 100.

    Raises:
        InvalidValueError: a value of the wrong type or out of range, ``hard`` without ``e2e_ms``, or budgets
            that contradict one another.
    """

    ttft_ms: float | None = _TTFT_MS
    """Time to first token of each generation in the turn, from the call to the first chunk."""
    tpot_ms: float | None = _TPOT_MS
    """Time per output token after the first, on average over each generation."""
    e2e_ms: float | None = 2000.0
    """The whole turn from its opening to its closing, with its tools and the agent's own code."""
    confidence: float = 0.9
    """Probability with which a mode must be predicted to meet every budget to count as fitting."""
    on_infeasible: OnInfeasible = "degrade"
    """Where no mode fits. ``degrade`` runs the mode most likely to fit, ``shorten`` lowers the token cap
    until one fits, ``reject`` raises ``InfeasibleError``."""
    hard: bool = False
    """End the generation at the end-to-end deadline with finish reason ``budget``."""
    stall_ms: float | None = 30_000.0
    """Longest wait for any next token, after which the generation fails with ``StallError``; None waits
    for ever. It is no budget: predictions and verdicts leave it out."""
    min_quality: float = 0.0
    """The least measured quality that may answer, at the decision and mid-stream: 1 is the reference, 0
    allows every variant. A variant whose quality was never measured counts as 0."""
    adapt: bool = True
    """While a stream runs behind its budgets, move it to a faster variant of at least ``min_quality``, and
    back to the planned one when it is ahead. False: a stream keeps the variant that it began with."""

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "tpot_ms", "e2e_ms", "stall_ms", "confidence", "min_quality"):
            object.__setattr__(self, name, plain_number(getattr(self, name)))
        for name in ("ttft_ms", "tpot_ms", "e2e_ms", "stall_ms"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and is_finite(value) and value > 0):
                raise InvalidValueError(
                    name,
                    observed=value,
                    limit="a finite number of milliseconds above 0, or None",
                    remedy="use None to leave this budget out",
                )
        if not (is_number(self.confidence) and 0 < self.confidence < 1):
            raise InvalidValueError(
                "confidence",
                observed=self.confidence,
                limit="a number between 0 and 1, both excluded",
                remedy="0.9 is usual",
            )
        if self.on_infeasible not in ("degrade", "shorten", "reject"):
            raise InvalidValueError(
                "on_infeasible",
                observed=self.on_infeasible,
                limit="'degrade', 'shorten' or 'reject'",
                remedy="'degrade' runs the mode that is most likely to fit",
            )
        if not isinstance(self.hard, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidValueError(
                "hard", observed=self.hard, limit="True or False", remedy="True ends at the deadline"
            )
        if not isinstance(self.adapt, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidValueError(
                "adapt", observed=self.adapt, limit="True or False", remedy="False keeps the first variant"
            )
        if not (is_number(self.min_quality) and 0 <= self.min_quality <= 1):
            raise InvalidValueError(
                "min_quality",
                observed=self.min_quality,
                limit="between 0 and 1",
                remedy="1 is the reference variant's quality, 0 allows every variant",
            )
        if self.hard and self.e2e_ms is None:
            raise InvalidValueError("hard", observed=True, limit="used with e2e_ms", remedy="set e2e_ms")
        self._check_together()

    def _check_together(self) -> None:
        for name, default in (("ttft_ms", _TTFT_MS), ("tpot_ms", _TPOT_MS)):
            value = getattr(self, name)
            if value is None:
                continue
            if self.e2e_ms is not None and value > self.e2e_ms:
                if value != default:
                    raise InvalidValueError(
                        name,
                        observed=value,
                        limit=f"at most e2e_ms, which is {self.e2e_ms:g}",
                        remedy="a part of the turn cannot have more time than the turn: raise e2e_ms, lower "
                        f"{name}, or use None to leave one of them out",
                    )
                object.__setattr__(self, name, self.e2e_ms)
            elif self.stall_ms is not None and self.stall_ms < value != default:
                raise InvalidValueError(
                    "stall_ms",
                    observed=self.stall_ms,
                    limit=f"at least {name}, which is {value:g}",
                    remedy=f"a generation would be ended while it still kept {name}: raise stall_ms, or use "
                    "None for no limit",
                )

    @classmethod
    def parse(cls, text: str) -> SLO:
        """Read budgets as people write them: ``TTFT<200ms, TPOT<30ms, E2E<2s``.

        Names in any case (``ttft``, ``time to first token``, ``tpot``, ``itl``, ``e2e``, ``end to end``,
        ``latency``), then ``<``, ``<=``, ``:``, ``=`` or a blank, then a number with ``us``, ``ms``, ``s``
        or ``min``. Separated by ``,``, ``;``, ``and`` or a new line. Beside them ``stall<5s``,
        ``confidence 95%``, ``quality>=0.95``, ``no adapting``, ``hard``, and ``else degrade``,
        ``else shorten`` or ``else reject``.

        A budget that is not named is None. What else is not named keeps its default.

        Raises:
            InvalidValueError: an unknown name, no unit, a duplicate, or a value that is not a time.
        """
        return cls(**parse_fields(text))

    def __str__(self) -> str:
        """A text that ``parse`` reads back to an equal SLO."""
        return format_fields(
            ttft_ms=self.ttft_ms,
            tpot_ms=self.tpot_ms,
            e2e_ms=self.e2e_ms,
            stall_ms=self.stall_ms,
            confidence=self.confidence,
            on_infeasible=self.on_infeasible,
            hard=self.hard,
            min_quality=self.min_quality,
            adapt=self.adapt,
        )
