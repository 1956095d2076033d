"""A scoring in flight: options as continuations of one prompt.

The prompt runs once; its last logits score every option's first token. Each option of several tokens
becomes a branch that shares the prompt's KV, runs all its tokens but the last, and is scored by the logits
of each. Branches share a pass as far as the prefill chunk allows.

Options are tokenized on their own, as continuations, and are taken as they are: whether an option begins
with a space is the caller's to say, and changes the tokens that are scored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline_engine.chunk import OptionScore, ScoreResult, Usage
from paceline_engine.core.generation import timeline_of
from paceline_engine.plan import Plan
from paceline_engine.request import ScoreRequest
from paceline_engine.schedule.sequence import SequenceState


class Scoring:
    """The options' tokens and the log probabilities found so far."""

    def __init__(
        self, request: ScoreRequest, plan: Plan, sequence: SequenceState, options: Sequence[Sequence[int]]
    ) -> None:
        self.request = request
        self.plan = plan
        self.cancelled = False
        self.trunk = sequence
        """Runs the prompt."""
        self._options = options
        self._logprobs = [[math.nan] * len(ids) for ids in options]
        self._branches: dict[int, SequenceState] = {}

    @property
    def first_sequence(self) -> SequenceState:
        return self.trunk

    @property
    def sequences(self) -> tuple[SequenceState, ...]:
        return (self.trunk, *self._branches.values())

    @property
    def done(self) -> bool:
        return not any(math.isnan(value) for values in self._logprobs for value in values)

    def targets(self, sequence: SequenceState, position: int, n_rows: int) -> list[tuple[int, int, int]]:
        """What the logits after the tokens at ``position`` and on score.

        Returns:
            (row, option, place in the option) of each log probability that they hold.
        """
        n_prompt = self.trunk.n_prompt
        if sequence is self.trunk:
            return [(0, option, 0) for option in range(len(self._options))]
        option = sequence.key.index - 1
        last = len(self._options[option]) - 1
        places = ((row, position + row + 1 - n_prompt) for row in range(n_rows))
        return [(row, option, place) for row, place in places if 0 <= place <= last]

    def token(self, option: int, place: int) -> int:
        return self._options[option][place]

    def record(self, option: int, place: int, logprob: float) -> None:
        """A branch computed again after a preemption finds the same values again."""
        self._logprobs[option][place] = logprob

    def branch(self) -> tuple[SequenceState, ...]:
        """One sequence for each option of more than one token."""
        self._branches = {
            option: self.trunk.fork(option + 1, list(ids[:-1]))
            for option, ids in enumerate(self._options)
            if len(ids) > 1
        }
        return tuple(self._branches.values())

    def result(self, *, finished_at_s: float) -> ScoreResult:
        n_read = self.trunk.n_prompt + sum(map(len, self._options))
        steps = {step.started_at_s: step for one in self.sequences for step in one.steps}
        self.trunk.steps = [steps[at_s] for at_s in sorted(steps)]
        self.trunk.events = sorted(
            {id(event): event for one in self.sequences for event in one.events}.values(),
            key=lambda event: event.at_s,
        )
        return ScoreResult(
            scores=tuple(
                OptionScore(text=text, n_tokens=len(values), logprob=math.fsum(values))
                for text, values in zip(self.request.options, self._logprobs, strict=True)
            ),
            usage=Usage(
                prompt_tokens=n_read, completion_tokens=0, cached_tokens=self.trunk.cached_tokens or 0
            ),
            timeline=timeline_of(self.trunk, tokens=(), finished_at_s=finished_at_s, prompt_tokens=n_read),
        )
