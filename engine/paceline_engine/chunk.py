"""What a backend streams: chunks of text, the last of each choice with how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from paceline_engine.timeline import Timeline


class FinishReason(StrEnum):
    STOP = "stop"
    """An end token or a stop string."""
    LENGTH = "length"
    """The token cap."""
    BUDGET = "budget"
    """The hard deadline."""
    CANCELLED = "cancelled"
    """The caller left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one choice."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Natural log probability of a drawn token, with the most likely ones beside it."""

    token_id: int
    text: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()
    """(token id, text, log probability), most likely first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """How one choice ended."""

    reason: FinishReason
    usage: Usage
    timeline: Timeline
    stop_text: str | None = None
    """The stop string that ended it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Newly settled text of one choice. The last chunk of a choice has ``finish``."""

    text: str
    made_at_s: float
    """Monotonic; when the last of its tokens was sampled."""
    token_ids: tuple[int, ...] = ()
    """Tokens sampled since the previous chunk; their text may still be held back (stop strings, UTF-8)."""
    index: int = 0
    """Which of the request's ``n`` choices."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish: Finish | None = None
    delivered_at_s: float | None = None
    """Monotonic; when the caller took it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionScore:
    """Log probability of one option given the prompt."""

    text: str
    n_tokens: int
    logprob: float
    """Sum over the option's tokens (natural log)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreResult:
    scores: tuple[OptionScore, ...]
    """In the order of the request's options."""
    usage: Usage
    timeline: Timeline
