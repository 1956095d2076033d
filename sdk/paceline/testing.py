"""Doubles for testing agents without a model: a scripted backend, and a clock that never waits.

    clock = ManualClock()
    backend = ScriptedBackend([Reply("Hello there", prefill_ms=150), "refund"], clock=clock)

    async def main():
        async with paceline.AsyncClient(backend=backend, clock=clock) as client:
            async with client.turn(slo=paceline.SLO(ttft_ms=100)) as turn:
                answer = await turn.generate("hi")
                await clock.sleep(0.3)                       # the agent's own work
                label = await turn.choose("which?", options=["refund", "rebook"])
            assert turn.report.verdicts[0].blame == "prefill"
            assert turn.report.e2e_ms > 450                  # and not one real millisecond of it

The backend keeps the contract of a real one: what it makes is made at its scripted time whether or not
anyone takes it, a closed or dropped stream is cancelled, hard deadlines and stall limits hold, and work
whose deadline has passed is refused.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Self

from paceline_engine.backends.base import ModelInfo, OnProgress
from paceline_engine.chunk import Chunk, Finish, FinishReason, OptionScore, ScoreResult, Usage
from paceline_engine.errors import (
    BackendError,
    ClosedError,
    DeadlineExpiredError,
    InvalidValueError,
    StallError,
)
from paceline_engine.grammar.base import GrammarKind
from paceline_engine.mode import Variant
from paceline_engine.plan import Plan
from paceline_engine.request import GenerationRequest, Message, Prompt, ScoreRequest
from paceline_engine.snapshot import Snapshot
from paceline_engine.timeline import Timeline, TokenTime
from paceline_policies.profile import Profile, VariantProfile
from paceline_policies.quality import Quality
from paceline_policies.step_model import StepModel

_SETTLE_TURNS = 20
"""Turns of the event loop that others get to start their own waiting before time moves."""


class ManualClock:
    """A monotonic clock that stands still until something waits for it; call it for the seconds.

    ``advance`` moves it by hand (work that blocks), ``sleep`` waits on it (work that awaits). When tasks
    sleep, time jumps to the earliest wake-up once the others had their turn, so tasks that run side by
    side overlap as they would in real time, in the same order every time.
    """

    def __init__(self, start_s: float = 1000.0) -> None:
        self._now_s = start_s
        self._lock = threading.Lock()
        self._sleepers: list[tuple[float, int]] = []
        self._numbers = itertools.count()

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move time on at once."""
        if not seconds >= 0:
            raise InvalidValueError(
                "seconds", observed=seconds, limit="0 or more", remedy="a monotonic clock never goes back"
            )
        with self._lock:
            self._now_s += seconds

    async def sleep(self, seconds: float) -> None:
        """Wait until the clock shows ``seconds`` more."""
        await self.sleep_until(self._now_s + seconds)

    async def sleep_until(self, at_s: float) -> None:
        """Wait until the clock shows ``at_s``; returns at once where it is past that."""
        me = (at_s, next(self._numbers))
        with self._lock:
            heapq.heappush(self._sleepers, me)
        try:
            while self._now_s < at_s:
                for _ in range(_SETTLE_TURNS):
                    await asyncio.sleep(0)
                with self._lock:
                    if self._sleepers[0] == me:
                        self._now_s = max(self._now_s, at_s)
        finally:
            with self._lock:
                self._sleepers.remove(me)
                heapq.heapify(self._sleepers)


@dataclass(frozen=True, slots=True)
class Reply:
    """What the backend does for one call. Times are in milliseconds; None takes the backend's default."""

    text: str | Sequence[str] = ""
    """Tokens; a text is cut into words. In answer to ``choose``, the option to prefer."""
    _: KW_ONLY
    queue_ms: float = 0.0
    prefill_ms: float | None = None
    tpot_ms: float | Sequence[float] | None = None
    """Of each token after the first; a sequence is the gap before each chunk after the first."""
    tokens_per_chunk: int | Sequence[int] = 1
    stall_after: int | None = None
    """After this many chunks nothing more comes."""
    error_after: int | None = None
    """After this many chunks a ``BackendError`` comes instead of the next one."""
    error: str = "scripted error"
    finish: FinishReason = FinishReason.STOP
    scores: Mapping[str, float] = field(default_factory=dict[str, float])
    """Log probabilities in answer to ``choose``; others get -10."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """One call as the backend got it."""

    request: GenerationRequest | ScoreRequest
    plan: Plan
    at_s: float


Script = str | Reply | Sequence[str | Reply] | Callable[[GenerationRequest | ScoreRequest], str | Reply]


class ScriptedBackend:
    """A backend that plays a script: one reply for each call, the last one again and again.

    Its profile (what the predictor knows) is that of its defaults, so replies that name no times of their
    own take exactly as long as predicted.

    Attributes:
        received: every call in order, with its plan.
        cancelled: ids of the requests that were left before their end.
        running: ids of the requests that run now.
        pinned: the prompts that are pinned now, by the pin's id.
        moved: (request id, variant) of each change that a caller asked for; what is said stays the same.
    """

    def __init__(
        self,
        script: Script,
        *,
        name: str = "scripted",
        clock: ManualClock | None = None,
        prefill_ms: float = 50.0,
        tpot_ms: float = 10.0,
        speeds: Mapping[Variant, float] | None = None,
        context_tokens: int = 32_768,
        waiting_prefill_tokens: int = 0,
    ) -> None:
        """Nothing runs yet.

        Args:
            script: the replies.
            name: unique among a client's backends.
            clock: give the client the same; without it the script runs in real time.
            prefill_ms: default of a reply, and what is predicted.
            tpot_ms: default of a reply, and what is predicted.
            speeds: the variants, best quality first, with the factor by which each takes longer.
            context_tokens: of the model.
            waiting_prefill_tokens: of the queue that snapshots report.
        """
        self._script = script
        self._name = name
        self._clock = clock
        self._prefill_ms = prefill_ms
        self._tpot_ms = tpot_ms
        self._speeds = {Variant.BF16: 1.0} if speeds is None else dict(speeds)
        self._context_tokens = context_tokens
        self._waiting_prefill_tokens = waiting_prefill_tokens
        self._n_replies = 0
        self._closed = False
        self.received: list[Received] = []
        self.cancelled: list[str] = []
        self.running: set[str] = set()
        self.pinned: dict[str, Prompt] = {}
        self.moved: list[tuple[str, Variant]] = []

    @property
    def name(self) -> str:
        return self._name

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def info(self) -> ModelInfo:
        return ModelInfo(
            name="scripted",
            fingerprint="scripted",
            context_tokens=self._context_tokens,
            vocab_size=1000,
            variants=tuple(self._speeds),
            bytes_per_variant={variant: int(1e6 * speed) for variant, speed in self._speeds.items()},
            device_name="script",
        )

    @property
    def profile(self) -> Profile:
        """A profile that predicts the defaults: a prefill of fixed length, and ``tpot_ms`` a token."""
        exact = ((1.0, 1.0, 1.0),) * 96
        return Profile(
            fingerprint=self.info.fingerprint,
            device=self.info.device_name,
            variants={
                variant: VariantProfile(
                    step=StepModel(
                        fixed_s=0.0,
                        chunk_s=self._prefill_ms * speed / 1e3,
                        decode_s=self._tpot_ms * speed / 1e3,
                    ),
                    samples=exact,
                )
                for variant, speed in self._speeds.items()
            },
            qualities={
                variant: Quality(value=1.0 - 0.01 * rank) for rank, variant in enumerate(self._speeds)
            },
        )

    async def start(self, on_progress: OnProgress | None = None) -> ModelInfo:
        self._check_open()
        return self.info

    async def prepare(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Prompt:
        self._check_open()
        if not messages:
            raise InvalidValueError("messages", observed=messages, limit="non-empty", remedy="pass a message")
        n_tokens = sum(4 + len(str(message.get("content", ""))) // 4 for message in messages)
        return Prompt(messages=tuple(messages), token_ids=(), n_tokens=n_tokens)

    async def snapshot(self, prompt: Prompt, *, salt: str = "", adapter: str | None = None) -> Snapshot:
        self._check_open()
        return Snapshot(
            taken_at_s=self.now_s(),
            prompt_tokens=prompt.n_tokens,
            adapter=adapter,
            waiting=1 if self._waiting_prefill_tokens else 0,
            waiting_prefill_tokens=self._waiting_prefill_tokens,
        )

    def submit(self, request: GenerationRequest, plan: Plan) -> AsyncIterator[Chunk]:
        return _ScriptedStream(self, request, plan)

    async def score(self, request: ScoreRequest, plan: Plan) -> ScoreResult:
        self._check_open()
        submitted_at_s = self.now_s()
        reply = self._take(request, plan)
        started_at_s = submitted_at_s + reply.queue_ms / 1e3
        ended_at_s = started_at_s + self.prefill_s(reply, plan)
        await self.wait_until(ended_at_s)
        if reply.error_after is not None:
            raise BackendError(reply.error, phase="prefill")
        preferred = reply.text if isinstance(reply.text, str) else "".join(reply.text)
        usage = Usage(prompt_tokens=request.prompt.n_tokens, completion_tokens=0)
        return ScoreResult(
            scores=tuple(
                OptionScore(
                    text=option,
                    n_tokens=1,
                    logprob=reply.scores.get(option, -0.1 if option == preferred else -10.0),
                )
                for option in request.options
            ),
            usage=usage,
            timeline=Timeline(
                mode=plan.mode,
                submitted_at_s=submitted_at_s,
                started_at_s=started_at_s,
                finished_at_s=ended_at_s,
                prompt_tokens=usage.prompt_tokens,
            ),
        )

    def pin(
        self,
        pin_id: str,
        prompt: Prompt,
        *,
        hold_s: float,
        salt: str = "",
        adapter: str | None = None,
    ) -> None:
        self.pinned[pin_id] = prompt

    def unpin(self, pin_id: str) -> None:
        self.pinned.pop(pin_id, None)

    def change_variant(self, request_id: str, variant: Variant) -> None:
        self.moved.append((request_id, variant))

    async def aclose(self) -> None:
        self._closed = True

    def now_s(self) -> float:
        return time.monotonic() if self._clock is None else self._clock()

    async def wait_until(self, at_s: float) -> None:
        """Until that time on the backend's clock; returns at once where it is past."""
        if self._clock is not None:
            await self._clock.sleep_until(at_s)
        elif (wait_s := at_s - time.monotonic()) > 0:
            await asyncio.sleep(wait_s)

    def prefill_s(self, reply: Reply, plan: Plan) -> float:
        given = reply.prefill_ms
        own = self._prefill_ms * self._speed(plan) if given is None else given
        return own / 1e3

    def gap_s(self, reply: Reply, plan: Plan, *, chunk: int, n_tokens: int) -> float:
        """Between a chunk (from 1) and the one before."""
        given = reply.tpot_ms
        if given is None:
            return n_tokens * self._tpot_ms * self._speed(plan) / 1e3
        if isinstance(given, Sequence):
            return given[min(chunk - 1, len(given) - 1)] / 1e3
        return n_tokens * given / 1e3

    def _speed(self, plan: Plan) -> float:
        return self._speeds.get(plan.mode.variant, 1.0)

    def _take(self, request: GenerationRequest | ScoreRequest, plan: Plan) -> Reply:
        now = self.now_s()
        if plan.deadline_at_s is not None and plan.deadline_at_s <= now:
            raise DeadlineExpiredError(late_ms=(now - plan.deadline_at_s) * 1e3)
        self.received.append(Received(request=request, plan=plan, at_s=now))
        if callable(self._script):
            reply = self._script(request)
        elif isinstance(self._script, (str, Reply)):
            reply = self._script
        else:
            reply = self._script[min(self._n_replies, len(self._script) - 1)]
        self._n_replies += 1
        return reply if isinstance(reply, Reply) else Reply(reply)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the backend is closed: make a new one")


class _ScriptedStream:
    """One generation. What is made and when follows from the script alone; taking it late changes nothing."""

    def __init__(self, backend: ScriptedBackend, request: GenerationRequest, plan: Plan) -> None:
        self._backend = backend
        self._request = request
        self._plan = plan
        self._submitted_at_s = backend.now_s()
        self._played: AsyncIterator[Chunk] | None = None
        self._text = ""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        if self._played is None:
            self._backend._check_open()
            reply = self._backend._take(self._request, self._plan)
            _check_form(reply, self._request)
            self._backend.running.add(self._request.id)
            self._played = self._play(reply)
        try:
            return await anext(self._played)
        except asyncio.CancelledError:
            self._cancel()
            raise
        except BaseException:
            self._backend.running.discard(self._request.id)
            raise

    async def aclose(self) -> None:
        self._cancel()

    def __del__(self) -> None:
        self._cancel()

    def _cancel(self) -> None:
        if self._request.id in self._backend.running:
            self._backend.running.discard(self._request.id)
            self._backend.cancelled.append(self._request.id)

    async def _play(self, reply: Reply) -> AsyncIterator[Chunk]:
        backend, plan = self._backend, self._plan
        started_at_s = self._submitted_at_s + reply.queue_ms / 1e3
        made_at_s = started_at_s + backend.prefill_s(reply, plan)
        chunks = _cut(reply, plan.max_tokens)
        times: list[TokenTime] = []

        def finish(reason: FinishReason, at_s: float) -> Finish:
            n_tokens = sum(each.n_tokens for each in times)
            self._backend.running.discard(self._request.id)
            return Finish(
                reason=reason,
                usage=Usage(prompt_tokens=self._request.prompt.n_tokens, completion_tokens=n_tokens),
                timeline=Timeline(
                    mode=plan.mode,
                    submitted_at_s=self._submitted_at_s,
                    started_at_s=started_at_s,
                    tokens=tuple(times),
                    finished_at_s=at_s,
                    prompt_tokens=self._request.prompt.n_tokens,
                ),
            )

        last_at_s = self._submitted_at_s
        for number, tokens in enumerate(chunks):
            if number:
                made_at_s = last_at_s + backend.gap_s(reply, plan, chunk=number, n_tokens=len(tokens))
            if number == reply.error_after:
                await backend.wait_until(made_at_s)
                raise BackendError(reply.error, partial_text=self._text, phase=_phase(number))
            due_at_s = float("inf") if number == reply.stall_after else made_at_s
            if (ended_at_s := await self._wait(due_at_s, last_at_s, number)) is not None:
                for chunk in self._ends("", (), ended_at_s, finish(FinishReason.BUDGET, ended_at_s)):
                    yield chunk
                return
            last_at_s = made_at_s
            if tokens:
                times.append(TokenTime(made_at_s=made_at_s, n_tokens=len(tokens)))
            text = "".join(tokens)
            self._text += text
            end: Finish | None = None
            if number == len(chunks) - 1:
                n_whole = sum(map(len, _cut(reply, None)))
                cut_short = sum(map(len, chunks)) < n_whole
                end = finish(FinishReason.LENGTH if cut_short else reply.finish, made_at_s)
            ids = tuple(range(len(tokens)))
            for chunk in self._ends(text, ids, made_at_s, end):
                yield chunk

    def _ends(self, text: str, ids: tuple[int, ...], at_s: float, end: Finish | None) -> list[Chunk]:
        return [
            Chunk(text=text, made_at_s=at_s, token_ids=ids, index=index, finish=end)
            for index in range(self._request.n)
        ]

    async def _wait(self, due_at_s: float, last_at_s: float, number: int) -> float | None:
        """Until the next chunk is made; gives the hard deadline where that comes first."""
        plan = self._plan
        stalled_at_s = float("inf") if plan.stall_limit_s is None else last_at_s + plan.stall_limit_s
        hard = plan.hard_deadline and plan.deadline_at_s is not None
        deadline_at_s = plan.deadline_at_s if hard and plan.deadline_at_s is not None else float("inf")
        first = min(due_at_s, stalled_at_s, deadline_at_s)
        if first == float("inf"):
            await asyncio.Event().wait()
        await self._backend.wait_until(first)
        if due_at_s == first:
            return None
        if deadline_at_s == first:
            return deadline_at_s
        raise StallError(
            f"no token came for {plan.stall_limit_s} s: raise stall_ms, or look at the backend",
            partial_text=self._text,
            phase=_phase(number),
        )


def _check_form(reply: Reply, request: GenerationRequest) -> None:
    """Refuse a reply that is not even of the kind that the request's grammar asks for.

    The script is not cut to the grammar: a schema is not checked beyond being JSON.
    """
    grammar = request.grammar
    if grammar is None or reply.error_after is not None:
        return
    text = reply.text if isinstance(reply.text, str) else "".join(reply.text)
    if grammar.kind is GrammarKind.ONE_OF:
        fits = text in json.loads(grammar.text)
    elif grammar.kind is GrammarKind.REGEX:
        fits = re.fullmatch(grammar.text, text) is not None
    else:
        try:
            json.loads(text)
            fits = True
        except ValueError:
            fits = False
    if not fits:
        raise InvalidValueError(
            "script",
            observed=text,
            limit=f"replies that suit the request's {grammar.kind}",
            remedy="script a reply that a backend could give",
        )


def _phase(number: int) -> str:
    return "decode" if number else "prefill"


def _cut(reply: Reply, max_tokens: int | None) -> list[Sequence[str]]:
    """The tokens of each chunk; one empty chunk where there are none."""
    text = reply.text
    tokens = re.findall(r"\s*\S+\s*$|\s*\S+", text) if isinstance(text, str) else list(text)
    tokens = tokens[:max_tokens]
    chunks: list[Sequence[str]] = []
    while tokens:
        per_chunk = reply.tokens_per_chunk
        n_tokens = (
            per_chunk if isinstance(per_chunk, int) else per_chunk[min(len(chunks), len(per_chunk) - 1)]
        )
        chunks.append(tokens[: max(1, n_tokens)])
        tokens = tokens[max(1, n_tokens) :]
    return chunks or [()]
