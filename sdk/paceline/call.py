"""One model call: prepare, snapshot, decide, submit, record. One direction, no step back."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from paceline.collect import Collector
from paceline.ledger import Clock, Ledger
from paceline.options import Options
from paceline.policy import Ask, Policy, Served
from paceline.report import GenerationRecord
from paceline_engine.chunk import Usage
from paceline_engine.errors import DeadlineExpiredError, InfeasibleError, PacelineError
from paceline_engine.limits import check_fits
from paceline_engine.mode import Mode
from paceline_engine.plan import Plan
from paceline_engine.request import GenerationRequest, Message, Prompt, ScoreRequest
from paceline_engine.snapshot import Snapshot
from paceline_engine.timeline import Timeline
from paceline_policies.decision import Decision
from paceline_policies.slo import SLO

if TYPE_CHECKING:
    from paceline.tracing.spans import ChatSpan, TurnSpan

DEFAULT_MAX_TOKENS = 256
"""Where neither the call nor its budgets say how much to generate."""
CHARACTERS_PER_TOKEN = 4
"""For the length of options before any tokenizer has seen them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the caller asked for, checked."""

    kind: str
    """``chat`` or ``choose``."""
    messages: tuple[Message, ...]
    tools: Sequence[Mapping[str, Any]] | None
    max_tokens: int | None
    options: Options
    choices: tuple[str, ...] = ()
    """The texts to score, for ``choose``."""
    slo: SLO | None = None
    """The call's own, where it has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """A call whose way is chosen; nothing was sent yet."""

    served: Served
    prompt: Prompt
    snapshot: Snapshot
    decision: Decision
    called_at_s: float
    decide_started_at_s: float
    decided_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """What every call of a turn shares."""

    served: Mapping[str, Served]
    policy: Policy
    ledger: Ledger
    clock: Clock
    span: TurnSpan
    keep: Callable[[Call, GenerationRecord], None]
    """Takes the record of a call that ended."""
    closing: set[asyncio.Task[None]] = field(default_factory=set["asyncio.Task[None]"])
    """Dropped streams that are being closed; the loop itself holds its tasks only weakly."""


async def decide(desk: Desk, wanted: Wanted) -> Decided:
    """Prepare the prompt, look at the backends and choose. Runs nothing."""
    called_at_s = desk.clock()
    looks = await _look(desk, wanted)
    decide_started_at_s = desk.clock()
    slo = wanted.slo if wanted.slo is not None else desk.ledger.slo
    left = desk.ledger.left(wanted.slo, called_at_s=called_at_s)
    deadline_at_s = desk.ledger.deadline_of(wanted.slo, called_at_s=called_at_s)
    if wanted.kind == "choose":
        max_tokens = 0
    elif wanted.max_tokens is not None:
        max_tokens = wanted.max_tokens
    else:
        room = min(_room(desk.served[name], *look) for name, look in looks.items())
        max_tokens = max(1, min(default_max_tokens(left.ttft_ms, left.tpot_ms, left.e2e_ms), room))
    ask = Ask(
        slo=slo,
        left=left,
        now_s=decide_started_at_s,
        deadline_at_s=deadline_at_s,
        max_tokens=max_tokens,
        option_tokens=tuple(1 + len(text) // CHARACTERS_PER_TOKEN for text in wanted.choices),
        n=wanted.options.n,
        mix_cache=wanted.options.mix_cache,
    )
    decision = desk.policy.decide(ask, {name: snapshot for name, (_, snapshot) in looks.items()})
    name = decision.backend if decision.backend in looks else next(iter(looks))
    prompt, snapshot = looks[name]
    return Decided(
        served=desk.served[name],
        prompt=prompt,
        snapshot=snapshot,
        decision=decision,
        called_at_s=called_at_s,
        decide_started_at_s=decide_started_at_s,
        decided_at_s=desk.clock(),
    )


def default_max_tokens(ttft_ms: float | None, tpot_ms: float | None, e2e_ms: float | None) -> int:
    """As many tokens as the budgets leave room for: one at TTFT, the others at TPOT, until E2E.

    TTFT is a limit, not what the first token will take: at most half of E2E is kept for it.
    """
    if tpot_ms is None or e2e_ms is None:
        return DEFAULT_MAX_TOKENS
    tokens = (e2e_ms - min(max(0.0, ttft_ms or 0.0), e2e_ms / 2)) // tpot_ms
    return max(1, 1 + int(min(tokens, sys.maxsize)))


def _room(served: Served, prompt: Prompt, snapshot: Snapshot) -> int:
    """Most tokens that fit behind a prompt."""
    capacity = snapshot.capacity_tokens
    most = served.info.context_tokens
    return (most if capacity is None else min(most, capacity + 1)) - prompt.n_tokens


def _least_tokens(desk: Desk, wanted: Wanted) -> int:
    """Tokens that have to fit behind the prompt: the cap, unless the budgets may lower it."""
    slo = wanted.slo if wanted.slo is not None else desk.ledger.slo
    if wanted.kind != "chat" or wanted.max_tokens is None or slo.on_infeasible == "shorten":
        return 1
    return wanted.max_tokens


async def _look(desk: Desk, wanted: Wanted) -> dict[str, tuple[Prompt, Snapshot]]:
    """Prompt and snapshot of every backend; one that fails is left out while another answers."""

    async def look(served: Served) -> tuple[Prompt, Snapshot]:
        prompt = await served.backend.prepare(wanted.messages, tools=wanted.tools)
        options = wanted.options
        # Looked at before the snapshot too: it takes the whole prompt to the backend.
        fits(served, prompt, None)
        snapshot = await served.backend.snapshot(prompt, salt=options.salt, adapter=options.adapter)
        fits(served, prompt, snapshot)
        return prompt, snapshot

    def fits(served: Served, prompt: Prompt, snapshot: Snapshot | None) -> None:
        check_fits(
            n_prompt=len(prompt.token_ids),
            n_more=_least_tokens(desk, wanted),
            more="max_tokens" if wanted.kind == "chat" else "the longest option",
            context_tokens=served.info.context_tokens,
            capacity_tokens=None if snapshot is None else snapshot.capacity_tokens,
        )

    if len(desk.served) == 1:
        [(name, served)] = desk.served.items()
        return {name: await look(served)}
    found = await asyncio.gather(*(look(served) for served in desk.served.values()), return_exceptions=True)
    looks: dict[str, tuple[Prompt, Snapshot]] = {}
    errors: list[BaseException] = []
    for name, result in zip(desk.served, found, strict=True):
        if isinstance(result, BaseException):
            errors.append(result)
        else:
            looks[name] = result
    if not looks:
        raise errors[0]
    return looks


class Call:
    """A decided call, from its dispatch to its one record."""

    __slots__ = (
        "_desk",
        "_ended",
        "_span",
        "collector",
        "decided",
        "id",
        "plan",
        "record",
        "request",
        "submitted_at_s",
        "wanted",
    )

    def __init__(self, desk: Desk, wanted: Wanted, decided: Decided) -> None:
        self.id = uuid4().hex
        self.wanted = wanted
        self.decided = decided
        self.collector: Collector | None = None
        self.record: GenerationRecord | None = None
        self._desk = desk
        self._ended = False
        self.request = _request(self.id, wanted, decided.prompt)
        self.submitted_at_s = decided.decided_at_s
        self._span: ChatSpan = desk.span.start_chat(
            self.request,
            model=decided.served.info,
            backend=decided.served.backend.name,
            started_at_s=decided.called_at_s,
            messages=wanted.messages,
        )
        self._span.decided(
            decided.decision, started_at_s=decided.decide_started_at_s, ended_at_s=decided.decided_at_s
        )
        self.plan: Plan | None = decided.decision.plan

    def ready(self) -> Plan:
        """The plan to send.

        Raises:
            InfeasibleError: nothing fits and the SLO rejects.
            DeadlineExpiredError: the deadline is hard and has passed; nothing is sent.
        """
        slo = self.wanted.slo if self.wanted.slo is not None else self._desk.ledger.slo
        deadline_at_s = self._desk.ledger.deadline_of(self.wanted.slo, called_at_s=self.decided.called_at_s)
        now = self._desk.clock()
        error: PacelineError | None = None
        if slo.hard and deadline_at_s is not None and deadline_at_s <= now:
            error = DeadlineExpiredError(late_ms=(now - deadline_at_s) * 1e3)
        elif self.plan is None:
            from paceline_policies.decide import infeasible_message

            error = InfeasibleError(
                infeasible_message(self.decided.decision, slo), decision=self.decided.decision
            )
        if error is not None:
            self.end(error=error)
            raise error
        assert self.plan is not None
        if self.plan.deadline_at_s is not None and self.plan.deadline_at_s <= now:
            # Late under a soft objective: a backend refuses expired work, and the caller still wants it.
            self.plan = replace(self.plan, deadline_at_s=None)
        self.submitted_at_s = now
        self.collector = Collector(
            n=self.wanted.options.n, mode=self.plan.mode, submitted_at_s=now, clock=self._desk.clock
        )
        return self.plan

    def without_deadline(self) -> Plan | None:
        """The same plan for work that grew late on its way, where its deadline is soft."""
        if self.plan is None or self.plan.hard_deadline or self.plan.deadline_at_s is None:
            return None
        self.plan = replace(self.plan, deadline_at_s=None)
        return self.plan

    @property
    def ended(self) -> bool:
        return self._ended

    def end(
        self,
        *,
        finish_reason: str | None = None,
        error: BaseException | None = None,
        usage: Usage | None = None,
        timeline: Timeline | None = None,
        output_text: str | None = None,
    ) -> None:
        """Make the record and end the span, once; later calls do nothing."""
        if self._ended:
            return
        self._ended = True
        decided, collector = self.decided, self.collector
        mode = self.plan.mode if self.plan is not None else _any_mode(decided)
        prompt_tokens = decided.prompt.n_tokens
        cached_tokens = decided.snapshot.cached_tokens.get(mode.variant, 0)
        seen = collector if collector is not None and self.wanted.kind == "chat" else None
        if timeline is None and seen is not None:
            timeline = seen.timeline(prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
        elif timeline is None:
            timeline = Timeline(
                mode=mode,
                submitted_at_s=self.submitted_at_s,
                finished_at_s=self._desk.clock(),
                prompt_tokens=prompt_tokens,
                cached_tokens=cached_tokens,
            )
        if usage is None and seen is not None:
            usage = seen.usage(prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
        elif usage is None:
            usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=0, cached_tokens=cached_tokens)
        self.record = GenerationRecord(
            id=self.id,
            kind=self.wanted.kind,
            decision=decided.decision,
            timeline=timeline,
            usage=usage,
            finish_reason=finish_reason,
            error=None if error is None else f"{type(error).__name__}: {error}",
            decide_ms=max(0.0, (timeline.submitted_at_s - decided.called_at_s) * 1e3),
            slo=self.wanted.slo,
            predicted_queue_ms=self._desk.policy.queue_ms(decided.decision, decided.snapshot),
        )
        if output_text is None and seen is not None:
            output_text = seen.text
        self._span.end(self.record, output_text=output_text, error=error)
        self._desk.keep(self, self.record)


def _request(call_id: str, wanted: Wanted, prompt: Prompt) -> GenerationRequest | ScoreRequest:
    options = wanted.options
    if wanted.kind == "choose":
        return ScoreRequest(
            id=call_id, prompt=prompt, options=wanted.choices, salt=options.salt, adapter=options.adapter
        )
    return GenerationRequest(
        id=call_id,
        prompt=prompt,
        sampling=options.sampling,
        stop=options.stop,
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
        grammar=options.grammar,
        n=options.n,
        salt=options.salt,
        adapter=options.adapter,
        session=options.session,
    )


def _any_mode(decided: Decided) -> Mode:
    """For the record of a call that was never sent."""
    candidates = decided.decision.candidates
    return candidates[0].mode if candidates else Mode(variant=decided.served.info.variants[0])
