"""Monotonic timestamps of the phases of one generation, and what follows from them.

Every time is in seconds on ``time.monotonic``, which on Linux, macOS and Windows is one clock for all
processes of a machine, so that a worker's stamps and its client's can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from paceline_engine.mode import Mode, Variant

VARIANT_CHANGED: Final = "variant_changed"
"""The event of a stream that moved to another variant; its attributes are ``from``, ``to`` and ``why``."""

VARIANT_LOADED: Final = "variant_loaded"
"""The event of a stream that waited for the weights of ``variant`` to be loaded, which took ``took_ms``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTime:
    """When a chunk of one or more tokens was made, and when the caller took it."""

    made_at_s: float
    n_tokens: int = 1
    delivered_at_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """One step of the engine in which the generation took part, with all that shared the step."""

    started_at_s: float
    ended_at_s: float
    variant: Variant
    prefill_tokens: int
    """Prompt tokens run in the step, over all sequences."""
    decode_tokens: int
    """Tokens run for sequences that decode, over all sequences (more than one each when verifying)."""
    n_sequences: int
    context_tokens: int
    """Sum over the sequences of the KV entries that the step's last token of each attends to."""
    attended_pairs: int
    """Sum over the step's tokens of the KV entries that each attends to (sliding windows ignored)."""
    drafting: bool = False
    """Whether the step only proposed draft tokens; the step that verifies them follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEvent:
    """Something that happened to the generation at one moment (a change of mode, a preemption)."""

    at_s: float
    name: str
    attributes: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A span of time with one cause: ``grammar``, ``queue``, ``prefill``, ``decode``, ``tool`` or
    ``consumer``."""

    name: str
    started_at_s: float
    ended_at_s: float
    attributes: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def duration_ms(self) -> float:
        return (self.ended_at_s - self.started_at_s) * 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What happened when. Fields are None for what was never reached."""

    mode: Mode
    submitted_at_s: float
    """The client handed the request to the backend."""
    queued_at_s: float | None = None
    """Its grammar was compiled and it entered the queue; None where that was at once."""
    started_at_s: float | None = None
    """The first step with this generation began: the queue ended."""
    tokens: tuple[TokenTime, ...] = ()
    finished_at_s: float | None = None
    steps: tuple[StepTime, ...] = ()
    events: tuple[TimelineEvent, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache served."""
    drafted_tokens: int = 0
    """Draft tokens that were verified."""
    accepted_tokens: int = 0
    """Draft tokens that became output."""

    @property
    def n_tokens(self) -> int:
        return sum(token.n_tokens for token in self.tokens)

    @property
    def grammar_ms(self) -> float:
        """Time from submission until the grammar was compiled, where that had to be waited for."""
        return 0.0 if self.queued_at_s is None else (self.queued_at_s - self.submitted_at_s) * 1e3

    def ttft_ms(self, *, delivered: bool = False) -> float | None:
        """Time from submission to the first token, made or delivered; None if there is none."""
        first = _at(self.tokens[0], delivered) if self.tokens else None
        return None if first is None else (first - self.submitted_at_s) * 1e3

    def tpot_ms(self, *, delivered: bool = False) -> float | None:
        """Decode time divided by the tokens after the first chunk; None where there are none."""
        if len(self.tokens) < 2:
            return None
        first, last = _at(self.tokens[0], delivered), _at(self.tokens[-1], delivered)
        if first is None or last is None:
            return None
        return (last - first) * 1e3 / (self.n_tokens - self.tokens[0].n_tokens)

    def e2e_ms(self, *, delivered: bool = False) -> float | None:
        """Time from submission to the end, made or delivered; None while it runs."""
        end = self.finished_at_s
        if end is None:
            return None
        if delivered and self.tokens:
            last = self.tokens[-1].delivered_at_s
            end = max(end, last) if last is not None else end
        return (end - self.submitted_at_s) * 1e3

    def phases(self) -> tuple[Phase, ...]:
        """Grammar, queue, prefill and decode, as far as the generation came, without gaps."""
        ends = self.finished_at_s
        first = self.tokens[0].made_at_s if self.tokens else None
        found: list[Phase] = []
        queued_at_s = self.submitted_at_s
        if self.queued_at_s is not None:
            found.append(Phase(name="grammar", started_at_s=queued_at_s, ended_at_s=self.queued_at_s))
            queued_at_s = self.queued_at_s
        if (queue_end := self.started_at_s if self.started_at_s is not None else ends) is not None:
            found.append(Phase(name="queue", started_at_s=queued_at_s, ended_at_s=queue_end))
        if (
            self.started_at_s is not None
            and (prefill_end := first if first is not None else ends) is not None
        ):
            found.append(
                Phase(
                    name="prefill",
                    started_at_s=self.started_at_s,
                    ended_at_s=prefill_end,
                    attributes={"prompt_tokens": self.prompt_tokens, "cached_tokens": self.cached_tokens},
                )
            )
        if first is not None and ends is not None:
            found.append(
                Phase(
                    name="decode",
                    started_at_s=first,
                    ended_at_s=max(first, ends),
                    attributes=self._decode_facts(),
                )
            )
        return tuple(found)

    def _decode_facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"output_tokens": self.n_tokens}
        if self.drafted_tokens:
            facts["drafted_tokens"] = self.drafted_tokens
            facts["accepted_tokens"] = self.accepted_tokens
        if moves := [event for event in self.events if event.name == VARIANT_CHANGED]:
            facts["variant_changes"] = len(moves)
            facts["last_variant"] = str(moves[-1].attributes["to"])
        return facts


def _at(token: TokenTime, delivered: bool) -> float | None:
    return token.delivered_at_s if delivered else token.made_at_s
