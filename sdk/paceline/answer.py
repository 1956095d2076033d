"""What ``generate`` and ``choose`` give back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from paceline_engine.chunk import FinishReason, ScoreResult, TokenLogprob, Usage
from paceline_engine.timeline import Timeline
from paceline_policies.decision import Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerChoice:
    """One of the ``n`` choices of an answer."""

    text: str
    finish_reason: FinishReason
    usage: Usage
    stop_text: str | None = None
    """The stop string that ended it."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    parsed: Any = None
    """With ``json_schema``: the text's value, or the pydantic model's instance. None where the text was cut
    by a stop string or a passed deadline before it was valid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer; ``str(answer)`` is its text."""

    choices: tuple[AnswerChoice, ...]
    usage: Usage
    """Of all choices together; the prompt counts once."""
    decision: Decision = field(repr=False)
    """How it was run, and which modes were turned down."""
    timeline: Timeline = field(repr=False)
    """Of the choice that ended last, with delivered times."""

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text

    @property
    def parsed(self) -> Any:
        """Of the first choice; see ``AnswerChoice.parsed``."""
        return self.choices[0].parsed

    @property
    def finish_reason(self) -> FinishReason:
        """Of the first choice."""
        return self.choices[0].finish_reason

    def __str__(self) -> str:
        return self.text


class Choice(str):
    """The option that scored best. It is its text: ``label == "refund"`` holds.

    Attributes:
        scores: each option's log probability given the prompt (natural log, summed over its tokens), in
            the order of the options.
        probabilities: the softmax of ``scores``: each option's share among the options.
        usage: the tokens that were read.
        decision: how it was run.
        timeline: when what happened.
    """

    __slots__ = ("decision", "probabilities", "scores", "timeline", "usage")

    scores: Mapping[str, float]
    probabilities: Mapping[str, float]
    usage: Usage
    decision: Decision
    timeline: Timeline

    @property
    def text(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return str.__str__(self)

    def __reduce__(self) -> tuple[object, ...]:
        fields = (dict(self.scores), self.usage, self.decision, self.timeline)
        return _choice, (str(self), *fields)


def choice_of(result: ScoreResult, *, decision: Decision, timeline: Timeline) -> Choice:
    """The best-scored option with every option's score; the earlier one where two are equal."""
    scores = {score.text: score.logprob for score in result.scores}
    return _choice(max(scores, key=scores.__getitem__), scores, result.usage, decision, timeline)


def _choice(
    text: str, scores: Mapping[str, float], usage: Usage, decision: Decision, timeline: Timeline
) -> Choice:
    choice = Choice(text)
    choice.scores = MappingProxyType(dict(scores))
    choice.probabilities = MappingProxyType(_softmax(scores))
    choice.usage = usage
    choice.decision = decision
    choice.timeline = timeline
    return choice


def _softmax(scores: Mapping[str, float]) -> dict[str, float]:
    top = max(scores.values())
    if not math.isfinite(top):
        return dict.fromkeys(scores, 1 / len(scores))
    shares = {text: math.exp(score - top) for text, score in scores.items()}
    total = math.fsum(shares.values())
    return {text: share / total for text, share in shares.items()}
