"""An engine without a model: it counts, at a pace of its own, in place of generating.

Name this module as ``EmbeddedConfig.source`` to drive everything but the network: the real worker, the
real stream, real cancellation and real deaths. Choice ``i`` of a request says ``"0 1 2 ..."``, one word a
token. A prompt may hold directives, each of which acts once that many tokens are out::

    !fail@2    the request ends with BackendError        !stall@2   no further token comes
    !raise@2   the step raises                           !exit@2    the process ends
    !hang@2    the step never ends

``source_options`` are the fields of ``Script``.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from paceline_engine.backends.base import ModelInfo, OnProgress, Progress
from paceline_engine.backends.embedded.config import EmbeddedConfig
from paceline_engine.backends.embedded.loop import OpenedEngine
from paceline_engine.chunk import Chunk, Finish, FinishReason, OptionScore, ScoreResult, Usage
from paceline_engine.core.base import StepOutput
from paceline_engine.errors import (
    BackendError,
    DeadlineExpiredError,
    InvalidValueError,
    ModelLoadError,
    PacelineError,
    PromptTooLongError,
)
from paceline_engine.fidelity import Fidelity, FidelityRequest
from paceline_engine.mode import Variant
from paceline_engine.plan import Plan
from paceline_engine.request import GenerationRequest, ScoreRequest
from paceline_engine.schedule.base import StepPolicy
from paceline_engine.snapshot import Snapshot
from paceline_engine.timeline import VARIANT_CHANGED, Timeline, TimelineEvent, TokenTime

CONTEXT_TOKENS = 100_000
VOCAB_SIZE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """How the scripted engine behaves."""

    step_s: float = 0.002
    """Duration of a step, asleep."""
    switches: int = 0
    """Times that a step gives the interpreter lock back besides, as a step of torch operators does."""
    load_s: float = 0.0
    """Duration of loading, asleep, with progress in tenths."""
    load_error: str | None = None
    """Loading fails with ``ModelLoadError`` for this reason."""
    load_exit: bool = False
    """The process ends while it loads."""


def open_engine(
    config: EmbeddedConfig, *, step_policy: StepPolicy | None, on_progress: OnProgress
) -> OpenedEngine:
    """What ``source.open_engine`` does, without a model; the step policy is not asked."""
    script = Script(**config.source_options)
    for tenth in range(10):
        on_progress(Progress(stage="load", done=tenth / 10))
        time.sleep(script.load_s / 10)
    if script.load_error is not None:
        raise ModelLoadError(config.model, reason=script.load_error, remedy="change the script")
    if script.load_exit:
        print("the script says exit", flush=True)
        os._exit(3)
    on_progress(Progress(stage="load", done=1.0))
    info = ModelInfo(
        name=config.model,
        fingerprint=f"scripted-{config.model}",
        speed_facts={"model": config.model, "kernels": "none"},
        context_tokens=CONTEXT_TOKENS,
        vocab_size=VOCAB_SIZE,
        variants=config.variants,
    )
    n_blocks = config.blocks(context_tokens=CONTEXT_TOKENS)
    return OpenedEngine(
        engine=ScriptedEngine(
            script, n_blocks=n_blocks, block_size=config.block_size, variants=config.variants
        ),
        info=info,
    )


def open_tokenizer(config: EmbeddedConfig) -> ByteTokenizer:
    return ByteTokenizer()


class ByteTokenizer:
    """UTF-8 bytes are the tokens; a conversation is its contents, one a line."""

    vocab_size = VOCAB_SIZE
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    has_chat_template = True

    def encode(self, text: str, *, add_bos: bool = False) -> tuple[int, ...]:
        return tuple(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes((token_id,))

    def render_chat(
        self, messages: Iterable[object], *, tools: Iterable[object] | None = None
    ) -> tuple[int, ...]:
        texts = [str(message.get("content", "")) for message in messages if isinstance(message, Mapping)]
        if not texts:
            raise InvalidValueError(
                "messages", observed=[], limit="at least one message", remedy="give the user's message"
            )
        return self.encode("\n".join(texts))


@dataclass(slots=True, kw_only=True)
class _Sequence:
    """One choice of a request."""

    request: GenerationRequest
    plan: Plan
    index: int
    submitted_at_s: float
    n_blocks: int
    directives: Mapping[str, int]
    variant: Variant
    started_at_s: float | None = None
    tokens: list[TokenTime] = field(default_factory=list[TokenTime])
    events: list[TimelineEvent] = field(default_factory=list[TimelineEvent])

    def due(self, directive: str) -> bool:
        at = self.directives.get(directive)
        return at is not None and len(self.tokens) >= at


class ScriptedEngine:
    """Keeps the interface of ``core.Engine``."""

    def __init__(
        self,
        script: Script,
        *,
        n_blocks: int,
        block_size: int,
        variants: tuple[Variant, ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._script = script
        self._n_blocks = n_blocks
        self._block_size = block_size
        self._variants = variants
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: list[_Sequence] = []
        self._running: list[_Sequence] = []
        self._scores: list[tuple[ScoreRequest, Plan, float]] = []
        self._comparisons: list[FidelityRequest] = []
        self._adapters: set[str] = set()
        self._pins: dict[str, tuple[int, float]] = {}
        """(blocks, end) of each pin."""

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._scores or self._comparisons)

    def submit(self, request: GenerationRequest, plan: Plan, *, submitted_at_s: float) -> None:
        if plan.deadline_at_s is not None and plan.deadline_at_s <= (now_s := self._clock()):
            raise DeadlineExpiredError(late_ms=(now_s - plan.deadline_at_s) * 1e3)
        if any(not 0 <= token_id < VOCAB_SIZE for token_id in request.sampling.logit_bias):
            raise InvalidValueError(
                "logit_bias",
                observed=dict(request.sampling.logit_bias),
                limit=f"token ids below {VOCAB_SIZE}",
                remedy="drop the ids that the vocabulary lacks",
            )
        if request.grammar is not None:
            raise InvalidValueError(
                str(request.grammar.kind),
                observed=request.grammar.text,
                limit="left out, because the scripted engine counts and keeps to no grammar",
                remedy="use the real engine, or paceline.testing.ScriptedBackend",
            )
        n_tokens = request.prompt.n_tokens + plan.max_tokens
        n_blocks = math.ceil(n_tokens / self._block_size)
        if n_blocks * request.n > self._n_blocks:
            raise PromptTooLongError(
                "prompt",
                observed=f"{n_tokens} tokens with its cap",
                limit=f"at most {self._n_blocks * self._block_size // request.n} tokens with its cap",
                remedy="shorten it, or give the backend more kv_tokens",
            )
        text = bytes(request.prompt.token_ids).decode("utf-8", "replace")
        directives = {name: int(at) for name, at in re.findall(r"!(\w+)@(\d+)", text)}
        choices = [
            _Sequence(
                request=request,
                plan=plan,
                index=index,
                submitted_at_s=submitted_at_s,
                n_blocks=n_blocks,
                directives=directives,
                variant=plan.mode.variant,
            )
            for index in range(request.n)
        ]
        with self._lock:
            self._waiting.extend(choices)

    def submit_score(self, request: ScoreRequest, plan: Plan, *, submitted_at_s: float) -> None:
        with self._lock:
            self._scores.append((request, plan, submitted_at_s))

    def submit_fidelity(self, request: FidelityRequest) -> None:
        """Answered by the next step: each token costs a nat, and no variant differs from another."""
        with self._lock:
            self._comparisons.append(request)

    def abort(self, request_id: str) -> None:
        with self._lock:
            self._drop(request_id)

    def change_variant(self, request_id: str, variant: Variant) -> None:
        with self._lock:
            for sequence in (*self._waiting, *self._running):
                if sequence.request.id == request_id:
                    attributes = {"from": str(sequence.variant), "to": str(variant), "why": "the caller"}
                    sequence.variant = variant
                    sequence.events.append(
                        TimelineEvent(at_s=self._clock(), name=VARIANT_CHANGED, attributes=attributes)
                    )

    def pin(
        self, pin_id: str, token_ids: tuple[int, ...], *, hold_s: float, salt: str, adapter: str | None
    ) -> int:
        """Counts the blocks, at most half of all; this engine has no cache to keep them in."""
        with self._lock:
            self._pins.pop(pin_id, None)
            n_blocks = min(self._n_blocks // 2 - self._pinned(), len(token_ids) // self._block_size)
            self._pins[pin_id] = (n_blocks, self._clock() + hold_s)
            return n_blocks * self._block_size

    def unpin(self, pin_id: str) -> None:
        with self._lock:
            self._pins.pop(pin_id, None)

    def end_session(self, session: str, *, salt: str = "") -> None:
        """It drafts nothing, and keeps nothing of sessions."""

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(sorted(self._adapters))

    def load_adapter(self, name: str, path: str) -> None:
        """Known by its name; nothing is read."""
        with self._lock:
            self._adapters.add(name)

    def unload_adapter(self, name: str) -> None:
        with self._lock:
            self._adapters.discard(name)

    def snapshot(self, token_ids: tuple[int, ...], *, salt: str = "", adapter: str | None = None) -> Snapshot:
        with self._lock:
            return Snapshot(
                taken_at_s=self._clock(),
                prompt_tokens=len(token_ids),
                running=len(self._running),
                waiting=len(self._waiting),
                free_blocks=self._free_blocks(),
                total_blocks=self._n_blocks,
                block_size=self._block_size,
                pinned_blocks=self._pinned(),
            )

    def step(self) -> StepOutput:
        with self._lock:
            began_s = self._clock()
            self._admit(began_s)
            acting = tuple(self._running)
        time.sleep(self._script.step_s)
        for _ in range(self._script.switches):
            time.sleep(0)
        for sequence in acting:
            _misbehave(sequence)
        with self._lock:
            return self._commit(acting, began_s)

    def _admit(self, now_s: float) -> None:
        while self._waiting and self._waiting[0].n_blocks <= self._free_blocks():
            sequence = self._waiting.pop(0)
            sequence.started_at_s = now_s
            self._running.append(sequence)

    def _commit(self, acting: tuple[_Sequence, ...], began_s: float) -> StepOutput:
        now_s = self._clock()
        chunks: list[tuple[str, Chunk]] = []
        errors: list[tuple[str, PacelineError]] = []
        for sequence in acting:
            request_id = sequence.request.id
            if sequence not in self._running or sequence.due("stall"):
                continue
            if sequence.due("fail"):
                errors.append((request_id, BackendError("the script says fail", phase="decode")))
                self._drop(request_id)
                continue
            chunk = _next_chunk(sequence, now_s)
            chunks.append((request_id, chunk))
            if chunk.finish is not None:
                self._running.remove(sequence)
        scores = tuple(
            (request.id, _score(request, plan, (submitted_at_s, began_s, now_s)))
            for request, plan, submitted_at_s in self._scores
        )
        fidelities = tuple((each.id, _fidelities(each, self._variants)) for each in self._comparisons)
        self._scores.clear()
        self._comparisons.clear()
        return StepOutput(chunks=tuple(chunks), scores=scores, fidelities=fidelities, errors=tuple(errors))

    def _drop(self, request_id: str) -> None:
        self._waiting = [each for each in self._waiting if each.request.id != request_id]
        self._running = [each for each in self._running if each.request.id != request_id]
        self._scores = [each for each in self._scores if each[0].id != request_id]
        self._comparisons = [each for each in self._comparisons if each.id != request_id]

    def _pinned(self) -> int:
        now_s = self._clock()
        return sum(n_blocks for n_blocks, ends_at_s in self._pins.values() if ends_at_s > now_s)

    def _free_blocks(self) -> int:
        return self._n_blocks - sum(sequence.n_blocks for sequence in self._running)


def _misbehave(sequence: _Sequence) -> None:
    if sequence.due("raise"):
        raise RuntimeError("the script says raise")
    if sequence.due("exit"):
        print("the script says exit", flush=True)
        os._exit(3)
    if sequence.due("hang"):
        time.sleep(3600.0)


def _next_chunk(sequence: _Sequence, now_s: float) -> Chunk:
    """One more word, or the end that the hard deadline sets."""
    plan = sequence.plan
    if plan.hard_deadline and plan.deadline_at_s is not None and now_s >= plan.deadline_at_s:
        finish = _finish(sequence, FinishReason.BUDGET, now_s)
        return Chunk(text="", made_at_s=now_s, index=sequence.index, finish=finish)
    position = len(sequence.tokens)
    sequence.tokens.append(TokenTime(made_at_s=now_s))
    ended = len(sequence.tokens) >= plan.max_tokens
    return Chunk(
        text=f"{position} ",
        made_at_s=now_s,
        token_ids=(position % VOCAB_SIZE,),
        index=sequence.index,
        finish=_finish(sequence, FinishReason.LENGTH, now_s) if ended else None,
    )


def _finish(sequence: _Sequence, reason: FinishReason, now_s: float) -> Finish:
    prompt_tokens = sequence.request.prompt.n_tokens
    return Finish(
        reason=reason,
        usage=Usage(prompt_tokens=prompt_tokens, completion_tokens=len(sequence.tokens)),
        timeline=Timeline(
            mode=sequence.plan.mode,
            submitted_at_s=sequence.submitted_at_s,
            started_at_s=sequence.started_at_s,
            tokens=tuple(sequence.tokens),
            finished_at_s=now_s,
            events=tuple(sequence.events),
            prompt_tokens=prompt_tokens,
        ),
    )


def _fidelities(request: FidelityRequest, variants: tuple[Variant, ...]) -> dict[Variant, Fidelity]:
    n_tokens = len(request.token_ids) - request.first_compared
    same = Fidelity(n_tokens=n_tokens, logprob=-float(n_tokens), kl_nats=0.0, n_agreed=n_tokens)
    return dict.fromkeys((request.reference, *variants), same)


def _score(request: ScoreRequest, plan: Plan, times_s: tuple[float, float, float]) -> ScoreResult:
    """Each byte of an option costs one nat: the shortest is the most likely."""
    submitted_at_s, started_at_s, finished_at_s = times_s
    sizes = [len(option.encode()) for option in request.options]
    return ScoreResult(
        scores=tuple(
            OptionScore(text=option, n_tokens=size, logprob=-float(size))
            for option, size in zip(request.options, sizes, strict=True)
        ),
        usage=Usage(prompt_tokens=request.prompt.n_tokens, completion_tokens=0),
        timeline=Timeline(
            mode=plan.mode,
            submitted_at_s=submitted_at_s,
            started_at_s=started_at_s,
            finished_at_s=finished_at_s,
            prompt_tokens=request.prompt.n_tokens,
        ),
    )
