"""One step of an agent: generations, choices and tools under one set of budgets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack, cast
from weakref import WeakSet

from paceline.answer import Answer, Choice, choice_of
from paceline.call import Call, Desk, Wanted, decide
from paceline.context import current_turn, enter_turn, leave_turn
from paceline.ledger import Clock, Ledger
from paceline.options import (
    GenerateOptions,
    check_max_tokens,
    check_messages,
    check_name,
    check_options,
    check_slo,
    parse_options,
)
from paceline.pin import PrefixPin
from paceline.policy import Policy, Served
from paceline.report import GenerationRecord, Report, ToolRecord, build_report
from paceline.stream import AsyncStream
from paceline_engine.chunk import FinishReason
from paceline_engine.errors import ClosedError, DeadlineExpiredError
from paceline_engine.request import Message, ScoreRequest
from paceline_policies.decision import Decision
from paceline_policies.slo import SLO

if TYPE_CHECKING:
    from paceline.sync import Turn
    from paceline.tracing.context import Activation
    from paceline.tracing.spans import ToolSpan, TurnSpan

_logger = logging.getLogger("paceline")

Messages = str | Sequence[Message]
"""A conversation, or one user's text."""
Tools = Sequence[Mapping[str, Any]]
"""Tools that the model may call, as JSON schemas in the form of the chat template."""
StartSpan = Callable[..., "TurnSpan"]


class Ready:
    """What a started client gives to its turns."""

    __slots__ = ("policy", "served")

    def __init__(self, *, served: Mapping[str, Served], policy: Policy) -> None:
        self.served = served
        self.policy = policy


class AsyncTurn:
    """Opened with ``async with client.turn() as turn``; several generations may run in it at once.

    TTFT and TPOT hold for each generation; E2E runs from the turn's opening to its closing, with the
    tools' and the agent's own time.
    """

    def __init__(
        self,
        *,
        name: str,
        slo: SLO,
        clock: Clock,
        start: Callable[[], Awaitable[Ready]],
        start_span: StartSpan,
    ) -> None:
        self._name = name
        self._slo = slo
        self._clock = clock
        self._start = start
        self._start_span = start_span
        self._desk: Desk | None = None
        self._records: list[GenerationRecord] = []
        self._tools: list[ToolRecord] = []
        self._open_tools: set[ToolCall] = set()
        self._streams: WeakSet[AsyncStream] = WeakSet()
        self._report: Report | None = None
        self._closed = False
        self._outer: AsyncTurn | Turn | None = None
        self._activation: Activation | None = None
        self._last_call: Call | None = None
        """The model call that ended last: what a tool's run is likely to continue."""

    async def __aenter__(self) -> Self:
        await self._enter()
        self._outer = current_turn()
        enter_turn(self)
        self._activation = self._activate()
        return self

    def _activate(self) -> Activation:
        """Make the turn's span current, so that spans of the agent's own code nest under it."""
        from paceline.tracing.context import activate

        return activate(self._opened().span.context)

    async def _enter(self) -> None:
        """Open the turn, without making it the current one. Its budgets count from the end of this."""
        if self._closed or self._desk is not None:
            raise ClosedError("a turn can be opened only once: call client.turn() for a new one")
        ready = await self._start()
        opened_at_s = self._clock()
        self._desk = Desk(
            served=ready.served,
            policy=ready.policy,
            ledger=Ledger(self._slo, opened_at_s=opened_at_s, clock=self._clock),
            clock=self._clock,
            span=self._start_span(self._name, slo=self._slo, started_at_s=opened_at_s),
            keep=self._keep,
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._exit(error)
        finally:
            if self._activation is not None:
                self._activation.end()
            leave_turn(self)

    async def aclose(self) -> None:
        """Close a turn that was entered by hand; calling it again does nothing."""
        if not self._closed and self._desk is not None:
            await self.__aexit__(None, None, None)

    async def _exit(self, error: BaseException | None) -> None:
        if self._closed or self._desk is None:
            return
        self._closed = True
        desk, ended_at_s = self._desk, self._clock()
        try:
            for stream in list(self._streams):
                await stream._close("the turn was closed while this stream was open: read it inside the turn")
            await _settle(desk.closing)
        finally:
            for tool in list(self._open_tools):
                tool._end(None)
            self._report = self._build(ended_at_s)
            desk.span.end(self._report, error=error)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._label()}>"

    def _label(self) -> str:
        state = "closed" if self._closed else "not open" if self._desk is None else "open"
        return f"'{self._name}': {state}, {self._slo}"

    @property
    def name(self) -> str:
        """The agent's, for traces and reports."""
        return self._name

    @property
    def slo(self) -> SLO:
        """The budgets of the turn."""
        return self._slo

    @property
    def closed(self) -> bool:
        """Whether the turn has ended; it cannot be opened again."""
        return self._closed

    @property
    def outer(self) -> AsyncTurn | Turn | None:
        """The turn in which this one was opened."""
        return self._outer

    @property
    def trace_id(self) -> str | None:
        """Hex; None where nothing is recorded."""
        return self._opened().span.trace_id

    @property
    def deadline_at_s(self) -> float | None:
        """When the turn should have ended, in seconds on the client's clock; None without an E2E budget."""
        return self._opened().ledger.deadline_at_s

    def remaining_ms(self) -> float | None:
        """Milliseconds left of the E2E budget; negative once it has passed, None without one."""
        return self._opened().ledger.remaining_ms()

    @property
    def report(self) -> Report:
        """The turn as it went; while it is open, as far as it came."""
        if self._report is not None:
            return self._report
        self._opened()
        return self._build(self._clock())

    def stream(
        self,
        messages: Messages,
        *,
        max_tokens: int | None = None,
        tools: Tools | None = None,
        slo: SLO | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncStream:
        """A generation as a stream of chunks; it begins when the first chunk is asked for.

        Args:
            messages: the conversation, or one user's text.
            max_tokens: most tokens for each choice; None for as many as the budgets leave room for.
            tools: what the model may call, as JSON schemas, rendered by the chat template.
            slo: budgets of this call alone; its E2E counts from the call and never outlasts the turn's.
            options: sampling, stop texts and more; ``paceline.options.GenerateOptions`` explains each.

        Raises:
            InvalidValueError: at once, for a value that is not allowed; UnknownOptionError for a name.
            ClosedError: at once, where the turn is not open.
            PromptTooLongError: with the first chunk; prompt and cap do not fit the model or its KV cache.
            InfeasibleError: with the first chunk; no mode fits and the SLO says ``reject``.
            DeadlineExpiredError: with the first chunk; the SLO is hard and its time has passed.
            GenerationError: with any chunk; it stalled or failed, and ``partial_text`` has what came.
        """
        desk = self._usable()
        wanted = Wanted(
            kind="chat",
            messages=check_messages(messages),
            tools=tools,
            max_tokens=check_max_tokens(max_tokens),
            options=parse_options(cast("Mapping[str, Any]", options)),
            slo=check_slo(slo),
        )
        stream = AsyncStream(desk, wanted)
        self._streams.add(stream)
        return stream

    async def generate(
        self,
        messages: Messages,
        *,
        max_tokens: int | None = None,
        tools: Tools | None = None,
        slo: SLO | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Answer:
        """The whole answer of a generation. Arguments and errors as ``stream``, with the first await."""
        stream = self.stream(messages, max_tokens=max_tokens, tools=tools, slo=slo, **options)
        return await stream.answer()

    async def choose(
        self,
        messages: Messages,
        *,
        options: Sequence[str],
        tools: Tools | None = None,
        slo: SLO | None = None,
        salt: str = "",
        adapter: str | None = None,
    ) -> Choice:
        """The likeliest of ``options`` as the answer, scored in one prefill without decoding.

        Scores are summed over an option's tokens, so of two options where one is the beginning of the
        other, the shorter one always wins: give options that differ from their first words.

        Args:
            messages: the conversation, or one user's text.
            options: the texts to choose from, each once. They continue the prompt as they stand.
            tools: as for ``stream``.
            slo: budgets of this call alone. Only E2E counts: a choice has no tokens.
            salt: prefixes are shared only between calls of the same salt.
            adapter: one that the backend serves.

        Raises:
            InvalidValueError: no options, an empty one or the same twice, or as ``stream``.
            InfeasibleError, DeadlineExpiredError, GenerationError, ClosedError: as ``stream``.
        """
        desk = self._usable()
        wanted = Wanted(
            kind="choose",
            messages=check_messages(messages),
            tools=tools,
            max_tokens=None,
            options=parse_options({"salt": salt, "adapter": adapter}),
            choices=check_options(options),
            slo=check_slo(slo),
        )
        call = Call(desk, wanted, await decide(desk, wanted))
        plan = call.ready()
        backend, request = call.decided.served.backend, cast("ScoreRequest", call.request)
        try:
            try:
                result = await backend.score(request, plan)
            except DeadlineExpiredError:
                later = call.without_deadline()
                if later is None:
                    raise
                result = await backend.score(request, later)
            choice = choice_of(result, decision=call.decided.decision, timeline=result.timeline)
        except Exception as error:
            call.end(error=error)
            raise
        except BaseException:
            call.end(finish_reason=FinishReason.CANCELLED)
            raise
        call.end(
            finish_reason=FinishReason.STOP,
            usage=result.usage,
            timeline=result.timeline,
            output_text=str(choice),
        )
        return choice

    async def plan(
        self,
        messages: Messages,
        *,
        max_tokens: int | None = None,
        tools: Tools | None = None,
        slo: SLO | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Decision:
        """What ``generate`` would do now, with every mode's prediction; runs nothing.

        Where nothing fits, ``feasible`` is False and ``remedy`` names the cheapest change that would fit;
        nothing is raised for it. Arguments as ``stream``.
        """
        wanted = Wanted(
            kind="chat",
            messages=check_messages(messages),
            tools=tools,
            max_tokens=check_max_tokens(max_tokens),
            options=parse_options(cast("Mapping[str, Any]", options)),
            slo=check_slo(slo),
        )
        return (await decide(self._usable(), wanted)).decision

    def tool(self, name: str, *, attributes: Mapping[str, Any] | None = None, pin: bool = True) -> ToolCall:
        """Time a tool's run as part of the turn: ``with turn.tool("lookup"):``, or ``async with``.

        An error in the block is recorded and goes on to the caller. While it runs, the prompt of the
        turn's last generation stays in the KV cache, so that other traffic does not evict what the next
        generation begins with: for a minute at most, within a share of the cache, where the backend can.

        Args:
            name: of the tool, for traces and reports.
            attributes: recorded on the tool's span, apart from those named for content (see
                docs/tracing.md).
            pin: False leaves the prompt to the cache's own order of eviction.
        """
        check_name(name)
        self._usable()
        return ToolCall(self, name, attributes, pin=pin)

    def _opened(self) -> Desk:
        if self._desk is None:
            raise ClosedError(
                "the turn is not open: open it with `async with client.turn() as turn:`, "
                "or with `with` where the client is a Client"
            )
        return self._desk

    def _usable(self) -> Desk:
        desk = self._opened()
        if self._closed:
            raise ClosedError("the turn is closed: open a new one with client.turn()")
        return desk

    def _keep(self, call: Call, record: GenerationRecord) -> None:
        self._records.append(record)
        if record.error is None:
            self._last_call = call
        if self._desk is not None and record.error is None and record.finish_reason != FinishReason.CANCELLED:
            try:
                self._desk.policy.observe(record.decision, call.decided.snapshot, record.timeline)
            except Exception:
                # The answer is there: what could not be learned from it must not take it away.
                _logger.exception("the policy could not learn from a generation")

    def _build(self, ended_at_s: float) -> Report:
        desk = self._opened()
        now = [tool.so_far(ended_at_s) for tool in self._open_tools]
        return build_report(
            name=self._name,
            trace_id=desk.span.trace_id,
            slo=self._slo,
            started_at_s=desk.ledger.opened_at_s,
            ended_at_s=ended_at_s,
            generations=tuple(sorted(self._records, key=lambda record: record.called_at_s)),
            tools=(*self._tools, *now),
        )


class ToolCall:
    """One run of a tool in a turn; a context manager, with and without ``async``."""

    def __init__(
        self, turn: AsyncTurn, name: str, attributes: Mapping[str, Any] | None, *, pin: bool = False
    ) -> None:
        self._turn = turn
        self._wants_pin = pin
        self._pin: PrefixPin | None = None
        self._name = name
        self._attributes = attributes
        self._span: ToolSpan | None = None
        self._started_at_s: float | None = None
        self._activation: Activation | None = None

    def __enter__(self) -> Self:
        if self._started_at_s is not None:
            raise ClosedError("a tool's run can be entered only once: call turn.tool() again")
        desk = self._turn._usable()
        self._started_at_s = desk.clock()
        last = self._turn._last_call
        if self._wants_pin and last is not None:
            self._pin = PrefixPin.of(last)
        self._span = desk.span.start_tool(
            self._name,
            started_at_s=self._started_at_s,
            attributes=self._attributes,
            pinned_tokens=self._pinned_tokens,
        )
        self._turn._open_tools.add(self)
        from paceline.tracing.context import activate

        self._activation = activate(self._span.context)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(error)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(error)

    def so_far(self, now_s: float) -> ToolRecord:
        assert self._started_at_s is not None
        return ToolRecord(
            name=self._name,
            started_at_s=self._started_at_s,
            ended_at_s=now_s,
            pinned_tokens=self._pinned_tokens,
        )

    @property
    def _pinned_tokens(self) -> int:
        return 0 if self._pin is None else self._pin.n_tokens

    def _end(self, error: BaseException | None) -> None:
        if self not in self._turn._open_tools:
            return
        self._turn._open_tools.discard(self)
        if self._pin is not None:
            self._pin.end()
        if self._activation is not None:
            self._activation.end()
        assert self._span is not None
        assert self._started_at_s is not None
        ended_at_s = self._turn._clock()
        self._turn._tools.append(
            ToolRecord(
                name=self._name,
                started_at_s=self._started_at_s,
                ended_at_s=ended_at_s,
                error=None if error is None else f"{type(error).__name__}: {error}",
                pinned_tokens=self._pinned_tokens,
            )
        )
        self._span.end(ended_at_s=ended_at_s, error=error)


async def _settle(closing: set[asyncio.Task[None]]) -> None:
    """Wait until dropped streams have freed their backends, so that the turn leaves nothing running."""
    loop = asyncio.get_running_loop()
    if mine := [task for task in closing if task.get_loop() is loop]:
        await asyncio.wait(mine)
