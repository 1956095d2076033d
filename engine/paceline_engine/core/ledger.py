"""The requests in flight: commits what passes gave to them, and gathers what the step emits."""

from __future__ import annotations

import copy

from paceline_engine.chunk import Chunk, FinishReason, ScoreResult
from paceline_engine.core import validate
from paceline_engine.core.base import StepOutput
from paceline_engine.core.drafting import DraftedStep
from paceline_engine.core.generation import Generation
from paceline_engine.core.passes import PassResult, WorkResult, failed_scores
from paceline_engine.core.residency import Loaded
from paceline_engine.core.scoring import Scoring
from paceline_engine.errors import BackendError, PacelineError
from paceline_engine.mode import Variant
from paceline_engine.schedule.base import Weights
from paceline_engine.schedule.scheduler import CopyBlock, Scheduler
from paceline_engine.schedule.sequence import SequenceState
from paceline_engine.speculate.sessions import SessionTexts
from paceline_engine.timeline import VARIANT_LOADED, TimelineEvent


class Ledger:
    """Not thread-safe: the engine's lock guards it."""

    def __init__(
        self,
        scheduler: Scheduler,
        weights: Weights,
        sessions: SessionTexts,
        copy_block: CopyBlock,
        max_steps_recorded: int,
    ) -> None:
        self.requests: dict[str, Generation | Scoring] = {}
        self._scheduler = scheduler
        self._weights = weights
        self._sessions = sessions
        self._moves: dict[str, Variant] = {}
        """Requests that their callers have moved to a variant that is yet to be loaded."""
        self._copy_block = copy_block
        self._max_steps_recorded = max_steps_recorded
        self._chunks: list[tuple[str, Chunk]] = []
        self._scores: list[tuple[str, ScoreResult]] = []
        self._errors: list[tuple[str, PacelineError]] = []

    def enter(self, job: Generation | Scoring) -> None:
        self.requests[job.request.id] = job
        self._scheduler.add(job.first_sequence)

    def cancel(self, request_id: str) -> None:
        """Take a request out of the schedule; it stays known until the next step says goodbye to it."""
        if (job := self.requests.get(request_id)) is not None:
            job.cancelled = True
            self._remove_sequences(job)

    def move(self, request_id: str, variant: Variant, now_s: float) -> None:
        """Run a request as ``variant`` from now on, or from when it is loaded; unknown ids are ignored."""
        if (job := self.requests.get(request_id)) is None:
            return
        self._moves.pop(request_id, None)
        if not self._weights.ready(variant):
            self._moves[request_id] = variant
            self._weights.want(variant)
            return
        for sequence in _sequences(job):
            self._scheduler.set_variant(sequence, variant, now_s, why="the caller")
            sequence.variant_held = True

    def settle(self, loaded: Loaded) -> None:
        """A load has ended: tell and move the streams that waited for it; where it failed, end them."""
        variant, at_s = loaded.variant, loaded.ended_at_s
        for request_id, job in list(self.requests.items()):
            waits = any(sequence.variant == variant for sequence in _sequences(job))
            if waits and loaded.error is not None:
                self._fail(job, copy.copy(loaded.error))
                continue
            speculation = job.plan.mode.speculation
            drafts = speculation is not None and speculation.draft_variant == variant
            if waits or drafts or self._moves.get(request_id) == variant:
                event = _loaded_event(loaded)
                for sequence in _sequences(job):
                    sequence.events.append(event)
        moved = [request_id for request_id, to in self._moves.items() if to == variant]
        for request_id in moved:
            del self._moves[request_id]
            if loaded.error is None:
                self.move(request_id, variant, at_s)

    def end_overdue(self, now_s: float) -> None:
        """End what was cancelled, what expired in the queue, and what reached its hard deadline."""
        for job in list(self.requests.values()):
            late = validate.deadline_error(job.plan, now_s)
            if job.cancelled:
                if isinstance(job, Generation):
                    self._end(job, FinishReason.CANCELLED, now_s)
                else:
                    self._forget(job)
            elif late is not None and job.first_sequence.started_at_s is None:
                self._fail(job, late)
            elif late is not None and isinstance(job, Generation) and job.plan.hard_deadline:
                self._end(job, FinishReason.BUDGET, now_s)

    def commit(self, result: PassResult) -> None:
        """Put down what one pass gave to each sequence that is still wanted."""
        for work in result.ran.work:
            sequence = work.sequence
            if sequence.started_at_s is None:
                sequence.started_at_s = result.step.started_at_s
            sequence.record_step(result.step, most=self._max_steps_recorded)
        if result.error is not None:
            self._fail_pass(result, result.error)
            return
        for part in result.results:
            sequence = part.work.sequence
            if sequence.removed:
                continue
            job = self.requests[sequence.key.request_id]
            if part.work.n_drafts:
                assert isinstance(job, Generation)
                self._commit_verified(job, part, result)
                continue
            self._scheduler.commit(sequence, len(part.work.token_ids), result.ran.variant)
            if isinstance(job, Scoring):
                self._commit_scores(job, part, result.step.ended_at_s)
            elif part.draws:
                self._commit_draws(job, part, result.step.ended_at_s)

    def commit_drafts(self, drafted: DraftedStep, at_s: float) -> None:
        """Put down what drafting took, before the step that verified the drafts."""
        for step, sequences in drafted.steps:
            for sequence in sequences:
                sequence.record_step(step, most=self._max_steps_recorded)
        for sequence, error in drafted.failures:
            sequence.events.append(
                TimelineEvent(
                    at_s=at_s,
                    name="drafting_failed",
                    attributes={"error": f"{type(error).__name__}: {error}"},
                )
            )

    def emit(self) -> StepOutput:
        """All that was gathered since the last time."""
        output = StepOutput(
            chunks=tuple(self._chunks), scores=tuple(self._scores), errors=tuple(self._errors)
        )
        self._chunks, self._scores, self._errors = [], [], []
        return output

    def _commit_draws(self, job: Generation, part: WorkResult, at_s: float) -> None:
        parent = part.work.sequence
        if self._failed_draw(job, part):
            return
        children: list[SequenceState] = []
        for draw in part.draws:
            choice = draw.choice
            if choice.index != parent.key.index:  # the prompt is done: the choice goes its own way
                choice.sequence = parent.fork(choice.index, [])
                children.append(choice.sequence)
            chunk = choice.accept(draw.drawn, made_at_s=at_s)
            self._chunks.append((job.request.id, chunk))
        parent.weight = 1
        ended = {choice.sequence.key for choice in job.choices if choice.ended}
        for child in children:
            if child.key not in ended:
                self._scheduler.branch(parent, child, self._copy_block)
        if parent.key in ended:
            self._scheduler.remove(parent)
        if not job.open_choices:
            self._forget(job)

    def _commit_verified(self, job: Generation, part: WorkResult, result: PassResult) -> None:
        """Take the drafts that the target drew as well, and the token that it drew after them.

        The KV of all of them but the last stands in the blocks, written by the target. What the blocks hold
        beyond is never read: the next pass writes there.
        """
        if self._failed_draw(job, part):
            return
        (draw,) = part.draws
        sequence = part.work.sequence
        chunk = draw.choice.accept(
            draw.drawn,
            made_at_s=result.step.ended_at_s,
            n_drafted=part.work.n_drafts,
            n_accepted=draw.n_accepted(part.work.drafts),
        )
        self._chunks.append((job.request.id, chunk))
        self._scheduler.commit(sequence, min(len(draw.drawn), sequence.n_remaining), result.ran.variant)
        if draw.choice.ended:
            self._scheduler.remove(sequence)
        if not job.open_choices:
            self._forget(job)

    def _failed_draw(self, job: Generation, part: WorkResult) -> bool:
        for draw in part.draws:
            if draw.undrawable is not None:
                output = draw.choice.output
                error = BackendError(
                    f"no token can be drawn: {draw.undrawable.reason}",
                    partial_text=output.text,
                    phase="decode" if output.token_ids else "prefill",
                )
                self._fail(job, error)
                return True
        return False

    def _commit_scores(self, job: Scoring, part: WorkResult, at_s: float) -> None:
        sequence = part.work.sequence
        if failed_scores(part):
            self._fail(job, BackendError("the model's logits are not a number", phase="prefill"))
            return
        for score in part.scores:
            job.record(score.option, score.place, score.logprob)
        if sequence.n_remaining == 0:
            if sequence is job.trunk:
                for branch in job.branch():
                    self._scheduler.branch(sequence, branch, self._copy_block)
            self._scheduler.remove(sequence)
        if job.done:
            self._scores.append((job.request.id, job.result(finished_at_s=at_s)))
            self._forget(job)

    def _end(self, job: Generation, reason: FinishReason, now_s: float) -> None:
        self._chunks += [(job.request.id, choice.end(reason, at_s=now_s)) for choice in job.open_choices]
        self._remove_sequences(job)
        self._forget(job)

    def _fail_pass(self, result: PassResult, cause: Exception) -> None:
        for work in result.ran.work:
            job = self.requests.get(work.sequence.key.request_id)
            if job is None or work.sequence.removed:
                continue
            text = job.choices[work.sequence.key.index].output.text if isinstance(job, Generation) else ""
            error = BackendError(
                f"the model failed in a pass of {result.ran.variant}: {type(cause).__name__}: {cause}",
                partial_text=text,
                phase="decode" if work.decodes else "prefill",
            )
            error.__cause__ = cause
            self._fail(job, error)

    def _fail(self, job: Generation | Scoring, error: PacelineError) -> None:
        self._errors.append((job.request.id, error))
        self._remove_sequences(job)
        self._forget(job)

    def _forget(self, job: Generation | Scoring) -> None:
        del self.requests[job.request.id]
        self._moves.pop(job.request.id, None)
        if isinstance(job, Generation) and (key := job.session) is not None:
            choice = job.choices[0]
            self._sessions.add(key, (*job.request.prompt.token_ids, *choice.output.token_ids))

    def _remove_sequences(self, job: Generation | Scoring) -> None:
        for sequence in _sequences(job):
            self._scheduler.remove(sequence)


def _sequences(job: Generation | Scoring) -> tuple[SequenceState, ...]:
    """Those of a request that have not ended, each once."""
    found = job.sequences if isinstance(job, Scoring) else [choice.sequence for choice in job.choices]
    return tuple({id(each): each for each in found if not each.removed}.values())


def _loaded_event(loaded: Loaded) -> TimelineEvent:
    took_ms = (loaded.ended_at_s - loaded.started_at_s) * 1e3
    attributes: dict[str, object] = {"variant": str(loaded.variant), "took_ms": took_ms}
    if loaded.error is None:
        return TimelineEvent(at_s=loaded.ended_at_s, name=VARIANT_LOADED, attributes=attributes)
    attributes["error"] = f"{type(loaded.error).__name__}: {loaded.error}"
    return TimelineEvent(at_s=loaded.ended_at_s, name="variant_unavailable", attributes=attributes)
