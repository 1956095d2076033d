"""Run one pass and draw or score from its logits. No scheduling state changes here: no lock is held."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from paceline_engine.core.generation import Choice, Generation
from paceline_engine.core.scoring import Scoring
from paceline_engine.cuda.faults import device_is_lost
from paceline_engine.model.base import ModelRunner
from paceline_engine.sampling.sampler import Drawn, Row, Undrawable, draw_tokens, score_tokens
from paceline_engine.schedule.scheduler import Pass, Work
from paceline_engine.timeline import StepTime


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawResult:
    """What one choice drew: a token, and before it the drafts that the target drew as well."""

    choice: Choice
    drawn: tuple[Drawn, ...]
    undrawable: Undrawable | None = None
    """Why not even the first token could be drawn; after accepted drafts the next step finds out."""

    def n_accepted(self, drafts: Sequence[int]) -> int:
        """How many of ``drafts`` were drawn as well."""
        pairs = zip(self.drawn, drafts, strict=False)
        return sum(token.token_id == draft for token, draft in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredToken:
    """The log probability of one token of one option."""

    option: int
    place: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkResult:
    """What one sequence's part of a pass gave."""

    work: Work
    draws: tuple[DrawResult, ...] = ()
    scores: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """A pass that has run, or failed."""

    ran: Pass
    step: StepTime
    results: tuple[WorkResult, ...] = ()
    error: Exception | None = field(default=None)
    """Set where the runner raised: then there are no results."""


def run_pass(
    part: Pass,
    runner: ModelRunner,
    requests: Mapping[str, Generation | Scoring],
    clock: Callable[[], float],
) -> PassResult:
    """One forward pass, then the draws and scores that its logits are for.

    Raises:
        RuntimeError: the device is lost, and with it every later pass.
    """
    started_at_s = clock()
    try:
        results = _forward(part, runner, requests, clock)
    except Exception as error:
        if device_is_lost(error):
            raise
        return PassResult(ran=part, step=_step_time(part, started_at_s, clock()), error=error)
    return PassResult(ran=part, step=_step_time(part, started_at_s, clock()), results=results)


def _forward(
    part: Pass,
    runner: ModelRunner,
    requests: Mapping[str, Generation | Scoring],
    clock: Callable[[], float],
) -> tuple[WorkResult, ...]:
    logits = runner.forward([work.slice() for work in part.work], part.variant)  # [rows, vocab]
    drawers: list[list[_Drawer]] = []
    scored: list[tuple[ScoredToken, ...]] = []
    n_before = 0
    for work in part.work:
        # A request aborted since the step began is gone: nothing is drawn for it.
        job = requests.get(work.sequence.key.request_id)
        choices: list[_Drawer] = []
        scores: tuple[ScoredToken, ...] = ()
        if isinstance(job, Generation) and work.n_rows:
            for choice in job.choices_of(work.sequence):
                choice.watch_time(clock())
                choices.append(_Drawer(choice, n_before, work.drafts))
        elif isinstance(job, Scoring) and work.n_rows:
            targets = job.targets(work.sequence, work.sequence.n_computed, work.n_rows)
            ids = [job.token(option, place) for _, option, place in targets]
            values = score_tokens(logits, [n_before + row for row, _, _ in targets], ids)
            scores = tuple(
                ScoredToken(option=option, place=place, logprob=value)
                for (_, option, place), value in zip(targets, values, strict=True)
            )
        drawers.append(choices)
        scored.append(scores)
        n_before += work.n_rows
    _draw([drawer for group in drawers for drawer in group], logits)
    if logits.is_cuda and not any(drawers) and not any(scored):
        # Nothing has waited for the device: without this a chunk of a prompt would seem to take no time.
        torch.cuda.synchronize(logits.device)
    return tuple(
        WorkResult(work=work, draws=tuple(drawer.result for drawer in group), scores=scores)
        for work, group, scores in zip(part.work, drawers, scored, strict=True)
    )


class _Drawer:
    """Draws one choice's tokens from consecutive rows, as long as they are the drafts that were run."""

    def __init__(self, choice: Choice, first_row: int, drafts: Sequence[int]) -> None:
        self._choice = choice
        self._first_row = first_row
        self._drafts = drafts
        self._output_ids = list(choice.output.token_ids) if drafts else choice.output.token_ids
        self._drawn: list[Drawn] = []
        self._undrawable: Undrawable | None = None
        self.done = False

    def row(self) -> Row:
        return Row(at=self._first_row + len(self._drawn), rule=self._choice.rule, output_ids=self._output_ids)

    def take(self, token: Drawn | Undrawable) -> None:
        if isinstance(token, Undrawable):
            self._undrawable = None if self._drawn else token
            self.done = True
            return
        place = len(self._drawn)
        self._drawn.append(token)
        self.done = place >= len(self._drafts) or token.token_id != self._drafts[place]
        if not self.done:
            self._output_ids.append(token.token_id)

    @property
    def result(self) -> DrawResult:
        return DrawResult(choice=self._choice, drawn=tuple(self._drawn), undrawable=self._undrawable)


def _draw(drawers: Sequence[_Drawer], logits: torch.Tensor) -> None:
    """Position by position: what a row's token is depends on those before it."""
    while active := [drawer for drawer in drawers if not drawer.done]:
        tokens = draw_tokens(logits, [drawer.row() for drawer in active])
        for drawer, token in zip(active, tokens, strict=True):
            drawer.take(token)


def failed_scores(result: WorkResult) -> bool:
    return any(math.isnan(score.logprob) for score in result.scores)


def _step_time(part: Pass, started_at_s: float, ended_at_s: float) -> StepTime:
    lengths = [(work.sequence.n_computed, len(work.token_ids)) for work in part.work]
    return StepTime(
        started_at_s=started_at_s,
        ended_at_s=ended_at_s,
        variant=part.variant,
        prefill_tokens=sum(len(work.token_ids) for work in part.work if not work.decodes),
        decode_tokens=sum(len(work.token_ids) for work in part.work if work.decodes),
        n_sequences=len(part.work),
        context_tokens=sum(position + count for position, count in lengths),
        # The token at place p attends to p + 1 entries, itself among them.
        attended_pairs=sum(count * position + count * (count + 1) // 2 for position, count in lengths),
    )
