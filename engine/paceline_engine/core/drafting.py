"""Drafts for the streams of a step, put into the work that its passes will verify. No lock is held here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from paceline_engine.core.generation import Choice, Generation
from paceline_engine.core.scoring import Scoring
from paceline_engine.schedule.base import SequenceKey
from paceline_engine.schedule.scheduler import Pass, Work
from paceline_engine.schedule.sequence import SequenceState
from paceline_engine.speculate.base import DraftRequest
from paceline_engine.speculate.length import Pace
from paceline_engine.speculate.proposal import Proposal
from paceline_engine.speculate.speculator import Drafts, Planned, Speculator
from paceline_engine.timeline import StepTime

Requests = Mapping[str, Generation | Scoring]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What was proposed for one choice."""

    choice: Choice
    proposal: Proposal


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedStep:
    """A step's passes with drafts to verify, and what drafting them took."""

    passes: tuple[Pass, ...]
    drafts: tuple[Draft, ...] = ()
    steps: tuple[tuple[StepTime, tuple[SequenceState, ...]], ...] = ()
    """The draft passes, with the sequences that took part in each."""
    failures: tuple[tuple[SequenceState, Exception], ...] = ()
    """Sequences that draft with a model no more."""


def draft_step(passes: tuple[Pass, ...], requests: Requests, speculator: Speculator) -> DraftedStep:
    """Propose drafts for all work that has room for them."""
    work = [part for one in passes for part in one.work if part.max_drafts]
    found = [(part, choice) for part in work if (choice := _choice(part, requests)) is not None]
    for part, choice in found:
        if choice.drafts is None:
            job = requests[part.sequence.key.request_id]
            choice.drafts = speculator.new_stream(job.session if isinstance(job, Generation) else None)
    if not found:
        return DraftedStep(passes=passes)
    paces = _paces(passes)
    asked = [_request(part, choice, paces) for part, choice in found]
    planned = [
        Planned(variant=one.variant, n_tokens=sum(len(part.token_ids) for part in one.work)) for one in passes
    ]
    n_decoding = sum(part.decodes for one in passes for part in one.work)
    drafts = speculator.draft(asked, planned, n_decoding)
    sequences = {id(request): part.sequence for request, (part, _) in zip(asked, found, strict=True)}
    proposals = {
        part.sequence.key: proposal
        for (part, _), proposal in zip(found, drafts.proposals, strict=True)
        if proposal.token_ids
    }
    return DraftedStep(
        passes=tuple(_with_drafts(one, proposals) for one in passes),
        drafts=tuple(
            Draft(choice=choice, proposal=proposal)
            for (_, choice), proposal in zip(found, drafts.proposals, strict=True)
        ),
        steps=_steps(drafts, sequences),
        failures=tuple((sequences[id(request)], error) for request, error in drafts.failures),
    )


def _choice(work: Work, requests: Requests) -> Choice | None:
    job = requests.get(work.sequence.key.request_id)
    if not isinstance(job, Generation) or work.sequence.removed:
        return None
    (choice,) = job.choices_of(work.sequence)
    return choice


def _paces(passes: Iterable[Pass]) -> dict[SequenceKey, Pace]:
    """Of every running stream in the step that has a target."""
    found: dict[SequenceKey, Pace] = {}
    for part in (part for one in passes for part in one.work if part.decodes):
        sequence, target_s = part.sequence, part.sequence.plan.tpot_target_s
        if target_s is not None:
            n_steps = max(1, sequence.n_output - sequence.accepted_tokens)
            found[sequence.key] = Pace(
                target_s=target_s,
                tokens_per_step=sequence.n_output / n_steps,
                drafts=part.max_drafts > 0,
            )
    return found


def _request(
    work: Work,
    choice: Choice,
    paces: Mapping[SequenceKey, Pace],
) -> DraftRequest:
    sequence = work.sequence
    speculation = sequence.plan.mode.speculation
    assert speculation is not None
    assert choice.drafts is not None
    return DraftRequest(
        stream=choice.drafts,
        speculation=speculation,
        target=sequence.variant,
        token_ids=sequence.token_ids,
        output_ids=choice.output.token_ids,
        rule=choice.rule,
        block_table=work.block_table,
        most=work.max_drafts,
        wanted=lambda: not sequence.removed,
        adapter=sequence.adapter,
        others=tuple(pace for key, pace in paces.items() if key != sequence.key),
    )


def _with_drafts(one: Pass, proposals: Mapping[SequenceKey, Proposal]) -> Pass:
    work = tuple(
        part
        if (proposal := proposals.get(part.sequence.key)) is None
        else part.with_drafts(proposal.token_ids)
        for part in one.work
    )
    return replace(one, work=work)


def _steps(
    drafts: Drafts, sequences: Mapping[int, SequenceState]
) -> tuple[tuple[StepTime, tuple[SequenceState, ...]], ...]:
    return tuple(
        (one.step, tuple(sequences[id(chain.request)] for chain in one.chains)) for one in drafts.passes
    )
