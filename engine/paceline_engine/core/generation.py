"""A generation in flight: one request, its choices, and what each has brought forth."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from paceline_engine.chunk import Chunk, Finish, FinishReason, Usage
from paceline_engine.core.output import Output, Piece
from paceline_engine.grammar.compiler import Compiled
from paceline_engine.grammar.constraint import GrammarConstraint
from paceline_engine.loading.base import Tokenizer
from paceline_engine.plan import Plan
from paceline_engine.request import GenerationRequest
from paceline_engine.sampling.draw import RandomStream
from paceline_engine.sampling.rules import DrawRule
from paceline_engine.sampling.sampler import Drawn
from paceline_engine.schedule.sequence import SequenceState
from paceline_engine.speculate.sessions import SessionKey
from paceline_engine.speculate.stream import DraftStream
from paceline_engine.timeline import Timeline, TimelineEvent, TokenTime

_RECENT_CHUNKS = 8
"""Chunks whose pace tells how many tokens still fit before a hard deadline."""
_PACE_MARGIN = 1.25
"""By how much a step may be slower than the slowest recent one and still be on time."""


class Choice:
    """One of a request's outputs. Until the prompt is done all choices share the first one's sequence."""

    def __init__(
        self,
        index: int,
        sequence: SequenceState,
        *,
        rule: DrawRule,
        output: Output,
        constraint: GrammarConstraint | None = None,
    ) -> None:
        self.index = index
        self.sequence = sequence
        self.rule = rule
        self.output = output
        self._constraint = constraint
        self._landed = False
        self.drafts: DraftStream | None = None
        """What the drafters know of it, from its first drafts on."""
        self._token_times: list[TokenTime] = []

    @property
    def ended(self) -> bool:
        return self.output.ending is not None

    def accept(
        self, drawn: Sequence[Drawn], *, made_at_s: float, n_drafted: int = 0, n_accepted: int = 0
    ) -> Chunk:
        """Take newly drawn tokens: into the output, the sequence and the timeline.

        Args:
            n_drafted: drafts that were verified; ``n_accepted`` of them are the first of ``drawn``.
        """
        piece = self.output.accept(drawn)
        self.sequence.drafted_tokens += n_drafted
        self.sequence.accepted_tokens += min(n_accepted, len(piece.token_ids))
        self.sequence.token_ids.extend(piece.token_ids)
        self._token_times.append(TokenTime(made_at_s=made_at_s, n_tokens=len(piece.token_ids)))
        if self.sequence.first_token_at_s is None:
            self.sequence.first_token_at_s = made_at_s
        self.sequence.last_token_at_s = made_at_s
        self._note_landing(at_s=made_at_s)
        return self._chunk(piece, at_s=made_at_s)

    def watch_time(self, now_s: float) -> None:
        """Tell the grammar how many tokens still fit before a hard deadline, at the recent pace."""
        plan = self.sequence.plan
        if self._constraint is None or not plan.hard_deadline or plan.deadline_at_s is None:
            return
        times = self._token_times[-_RECENT_CHUNKS:]
        paces = [
            (after.made_at_s - before.made_at_s) / after.n_tokens
            for before, after in itertools.pairwise(times)
        ]
        pace_s = max(paces, default=plan.tpot_target_s or 0.0) * _PACE_MARGIN
        if pace_s > 0:
            n_more = max(0, int((plan.deadline_at_s - now_s) / pace_s))
            # The token of the logits at hand takes no further step.
            self._constraint.limit_time(len(self.output.token_ids) + 1 + n_more)

    def _note_landing(self, *, at_s: float) -> None:
        if self._landed or self._constraint is None:
            return
        landing = self._constraint.landing(len(self.output.token_ids))
        if landing is None:
            return
        self._landed = True
        attributes: dict[str, object] = {
            "cause": str(landing.cause),
            "position": landing.position,
            "tokens_left": landing.tokens_left,
        }
        if landing.tokens_needed is not None:
            attributes["tokens_needed"] = landing.tokens_needed
        self.sequence.events.append(TimelineEvent(at_s=at_s, name="landing", attributes=attributes))

    def end(self, reason: FinishReason, *, at_s: float) -> Chunk:
        """End the choice from outside, with the text so far."""
        return self._chunk(self.output.end(reason), at_s=at_s)

    def _chunk(self, piece: Piece, *, at_s: float) -> Chunk:
        finish = None
        if piece.ending is not None:
            finish = Finish(
                reason=piece.ending.reason,
                usage=Usage(
                    prompt_tokens=self.sequence.n_prompt,
                    completion_tokens=len(self.output.token_ids),
                    cached_tokens=self.sequence.cached_tokens or 0,
                ),
                timeline=timeline_of(self.sequence, tokens=self._token_times, finished_at_s=at_s),
                stop_text=piece.ending.stop_text,
            )
        return Chunk(
            text=piece.text,
            made_at_s=at_s,
            token_ids=piece.token_ids,
            index=self.index,
            logprobs=piece.logprobs,
            finish=finish,
        )


class Generation:
    """A request's choices, and whether its prompt has been branched into them."""

    def __init__(
        self,
        request: GenerationRequest,
        plan: Plan,
        sequence: SequenceState,
        *,
        tokenizer: Tokenizer,
        eos_ids: Collection[int],
        grammar: Compiled | None = None,
    ) -> None:
        self.request = request
        self.plan = plan
        self.cancelled = False
        end_ids = {*request.stop_token_ids, *(() if request.ignore_eos else eos_ids)}
        sampling = request.sampling

        def choice(index: int) -> Choice:
            constraint = (
                None
                if grammar is None
                else GrammarConstraint(grammar, max_tokens=plan.max_tokens, end_ids=end_ids)
            )
            rule = DrawRule(
                sampling,
                stream=RandomStream.for_request(sampling.seed, index),
                prompt_ids=request.prompt.token_ids,
                end_ids=end_ids,
                constraint=constraint,
            )
            output = Output(
                tokenizer,
                max_tokens=plan.max_tokens,
                end_ids=end_ids,
                stop=request.stop,
                min_tokens=sampling.min_tokens,
                form=constraint,
            )
            return Choice(index, sequence, rule=rule, output=output, constraint=constraint)

        self.choices = tuple(map(choice, range(request.n)))

    @property
    def session(self) -> SessionKey | None:
        """None where it belongs to none, or where the mode shares nothing with other requests."""
        request = self.request
        if not request.session or not self.plan.mode.prefix_cache:
            return None
        return SessionKey(session=request.session, salt=request.salt)

    @property
    def first_sequence(self) -> SequenceState:
        return self.choices[0].sequence

    @property
    def open_choices(self) -> tuple[Choice, ...]:
        return tuple(choice for choice in self.choices if not choice.ended)

    def choices_of(self, sequence: SequenceState) -> tuple[Choice, ...]:
        """Those that draw from the sequence's next logits: all of them while they share the prompt."""
        return tuple(choice for choice in self.choices if choice.sequence is sequence)


def timeline_of(
    sequence: SequenceState,
    *,
    tokens: Sequence[TokenTime],
    finished_at_s: float,
    prompt_tokens: int | None = None,
) -> Timeline:
    return Timeline(
        mode=sequence.plan.mode,
        submitted_at_s=sequence.submitted_at_s,
        queued_at_s=sequence.queued_at_s,
        started_at_s=sequence.started_at_s,
        tokens=tuple(tokens),
        finished_at_s=finished_at_s,
        steps=tuple(sequence.steps),
        events=tuple(sequence.events),
        prompt_tokens=sequence.n_prompt if prompt_tokens is None else prompt_tokens,
        cached_tokens=sequence.cached_tokens or 0,
        drafted_tokens=sequence.drafted_tokens,
        accepted_tokens=sequence.accepted_tokens,
    )
