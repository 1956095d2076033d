"""Gathers the chunks of one generation, and stamps them as the caller takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.answer import AnswerChoice
from paceline_engine.chunk import Chunk, Finish, FinishReason, TokenLogprob, Usage
from paceline_engine.mode import Mode
from paceline_engine.timeline import Timeline, TokenTime


@dataclass(slots=True)
class _Gathered:
    """One choice as far as it came."""

    pieces: list[str] = field(default_factory=list[str])
    taken: list[TokenTime] = field(default_factory=list[TokenTime])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    finish: Finish | None = None


class Collector:
    """Everything that was delivered of one generation."""

    __slots__ = ("_choices", "_clock", "_mode", "_n_open", "_submitted_at_s")

    def __init__(self, *, n: int, mode: Mode, submitted_at_s: float, clock: Callable[[], float]) -> None:
        self._choices = [_Gathered() for _ in range(n)]
        self._n_open = n
        self._mode = mode
        self._submitted_at_s = submitted_at_s
        self._clock = clock

    def take(self, chunk: Chunk) -> Chunk | None:
        """The chunk with its time of delivery, or None where there is nothing in it for the caller.

        A server's opening chunk names a role and has no text: it is no first token.
        """
        choice = self._choices[chunk.index]
        n_tokens = len(chunk.token_ids)
        if not (chunk.text or n_tokens or chunk.finish or chunk.logprobs):
            return None
        now = self._clock()
        if chunk.text:
            choice.pieces.append(chunk.text)
        if chunk.text or n_tokens:
            choice.taken.append(
                TokenTime(made_at_s=chunk.made_at_s, n_tokens=n_tokens or 1, delivered_at_s=now)
            )
        if chunk.logprobs:
            choice.logprobs.extend(chunk.logprobs)
        if chunk.finish is not None:
            self._n_open -= choice.finish is None
            choice.finish = _delivered(chunk.finish, choice.taken, now)
        # Built plainly, as below: this runs for every token.
        return Chunk(
            text=chunk.text,
            made_at_s=chunk.made_at_s,
            token_ids=chunk.token_ids,
            index=chunk.index,
            logprobs=chunk.logprobs,
            finish=None if chunk.finish is None else choice.finish,
            delivered_at_s=now,
        )

    @property
    def complete(self) -> bool:
        """Every choice has ended."""
        return self._n_open == 0

    @property
    def empty(self) -> bool:
        return not any(choice.taken or choice.finish for choice in self._choices)

    @property
    def text(self) -> str:
        """Of the first choice, so far."""
        return "".join(self._choices[0].pieces)

    @property
    def finish_reason(self) -> FinishReason | None:
        finish = self._choices[0].finish
        return None if finish is None else finish.reason

    def usage(self, *, prompt_tokens: int, cached_tokens: int) -> Usage:
        """Tokens of all choices so far; what the backend counted goes before what was seen."""
        finishes = [choice.finish for choice in self._choices if choice.finish is not None]
        if finishes:
            prompt_tokens = finishes[0].usage.prompt_tokens
            cached_tokens = finishes[0].usage.cached_tokens
        return Usage(
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            completion_tokens=sum(
                sum(time.n_tokens for time in choice.taken)
                if choice.finish is None
                else choice.finish.usage.completion_tokens
                for choice in self._choices
            ),
        )

    def timeline(self, *, prompt_tokens: int, cached_tokens: int) -> Timeline:
        """Of the choice that ended last; of what was seen where the generation was left before its end.

        When the queue ended is known only to the backend, so a generation that was left counts all the
        time before its first token as prefill, and as queue where no token came.
        """
        finishes = [choice.finish for choice in self._choices if choice.finish is not None]
        if len(finishes) == len(self._choices):
            return max((finish.timeline for finish in finishes), key=lambda line: line.finished_at_s or 0.0)
        taken = max((choice.taken for choice in self._choices), key=len)
        return Timeline(
            mode=self._mode,
            submitted_at_s=self._submitted_at_s,
            started_at_s=self._submitted_at_s if taken else None,
            tokens=tuple(taken),
            finished_at_s=self._clock(),
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
        )

    def answers(self, parse: Callable[[str], Any] | None = None) -> tuple[AnswerChoice, ...]:
        """The choices that ended, with the values that ``parse`` gives for their texts."""
        return tuple(
            AnswerChoice(
                text="".join(choice.pieces),
                finish_reason=choice.finish.reason,
                usage=choice.finish.usage,
                stop_text=choice.finish.stop_text,
                logprobs=tuple(choice.logprobs) if choice.logprobs else None,
                parsed=_parsed("".join(choice.pieces), parse),
            )
            for choice in self._choices
            if choice.finish is not None
        )


def _parsed(text: str, parse: Callable[[str], Any] | None) -> Any:
    if parse is None:
        return None
    try:
        return parse(text)
    except ValueError:  # pydantic's error is one too
        return None


def _delivered(finish: Finish, taken: Sequence[TokenTime], now: float) -> Finish:
    """The backend's timeline with the times at which the caller took each token.

    A token is delivered with the first chunk made at or after it: text may be held back for a while.
    """
    place, n_taken = 0, len(taken)
    tokens: list[TokenTime] = []
    for token in finish.timeline.tokens:
        while place < n_taken and taken[place].made_at_s < token.made_at_s:
            place += 1
        if place < n_taken:
            chunk = taken[place]
            if chunk.made_at_s == token.made_at_s and chunk.n_tokens == token.n_tokens:
                tokens.append(chunk)
                continue
        delivered = taken[place].delivered_at_s if place < n_taken else now
        # Built plainly: replace() takes several times as long.
        tokens.append(TokenTime(made_at_s=token.made_at_s, n_tokens=token.n_tokens, delivered_at_s=delivered))
    return replace(finish, timeline=replace(finish.timeline, tokens=tuple(tokens)))
