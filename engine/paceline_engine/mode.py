"""What the policy chooses: the precision of the weights and how decoding runs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from paceline_engine.errors import InvalidValueError, UnknownOptionError
from paceline_engine.numeric import is_whole


class Variant(StrEnum):
    """One precision of the weights. All variants come from one checkpoint and share one KV cache.

    ``fp32`` is the reference that tests compare against; it is run only when asked for by name.
    """

    FP32 = "fp32"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"


class Drafter(StrEnum):
    """Who proposes the draft tokens that the target variant verifies."""

    NGRAM = "ngram"
    """Suffix look-up in the prompt and the session's history."""
    SELF = "self"
    """The same model at a lower precision."""


_Name = TypeVar("_Name", bound=StrEnum)


def _named(kind: type[_Name], value: str, name: str) -> _Name:
    """The member of that name, also where it was given as plain text."""
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(repr(str(each)) for each in kind)
        raise UnknownOptionError(
            name, observed=value, limit=f"one of {known}", remedy="check the spelling"
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Draft up to ``max_draft_tokens`` tokens with ``drafter``; the target verifies them in one pass."""

    drafter: Drafter
    max_draft_tokens: int
    draft_variant: Variant | None = None
    """The variant that drafts; set exactly when ``drafter`` is ``self``."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "drafter", _named(Drafter, self.drafter, "drafter"))
        if self.draft_variant is not None:
            variant = _named(Variant, self.draft_variant, "draft_variant")
            object.__setattr__(self, "draft_variant", variant)
        if not (is_whole(self.max_draft_tokens) and self.max_draft_tokens >= 1):
            raise InvalidValueError(
                "max_draft_tokens",
                observed=self.max_draft_tokens,
                limit="a whole number, at least 1",
                remedy="leave speculation out to decode without drafts",
            )
        if (self.drafter is Drafter.SELF) != (self.draft_variant is not None):
            raise InvalidValueError(
                "draft_variant",
                observed=self.draft_variant,
                limit="set exactly when the drafter is 'self'",
                remedy="name the variant that drafts, or use the ngram drafter",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One way to run a generation."""

    variant: Variant
    speculation: Speculation | None = None
    prefix_cache: bool = True
    mix_cache: bool = False
    """Let the prefix cache serve KV that lower variants wrote, for speed over fidelity."""
    batch_cap: int = 8
    """Most sequences that may share a step with this one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "variant", _named(Variant, self.variant, "variant"))
        if not (is_whole(self.batch_cap) and self.batch_cap >= 1):
            raise InvalidValueError(
                "batch_cap",
                observed=self.batch_cap,
                limit="a whole number, at least 1",
                remedy="use 1 to run the sequence alone",
            )

    @property
    def label(self) -> str:
        """A short name for tables and traces, such as ``bf16``, ``bf16+ngramx8`` or ``bf16+int4x4``.

        Behind the ``x`` stands the most drafts of a pass.
        """
        if self.speculation is None:
            return str(self.variant)
        spec = self.speculation
        drafter = spec.draft_variant if spec.draft_variant is not None else spec.drafter
        return f"{self.variant}+{drafter}x{spec.max_draft_tokens}"
