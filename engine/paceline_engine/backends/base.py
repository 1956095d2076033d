"""The contract that every backend keeps. One test suite runs against all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from paceline_engine.chunk import Chunk, ScoreResult
from paceline_engine.fidelity import Fidelity, FidelityRequest
from paceline_engine.mode import Speculation, Variant
from paceline_engine.plan import Plan
from paceline_engine.request import GenerationRequest, Message, Prompt, ScoreRequest
from paceline_engine.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a slow start has come."""

    stage: str
    """``fetch``, ``load``, ``convert`` or ``calibrate``."""
    done: float
    """Between 0 and 1."""
    message: str = ""


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a started backend serves."""

    name: str
    """For people and traces, such as ``gemma3-270m``."""
    fingerprint: str
    """Digest of the checkpoint and of what else changes its speed or output; keys saved profiles."""
    context_tokens: int
    """Longest prompt and output together."""
    vocab_size: int
    variants: tuple[Variant, ...]
    """What a plan may ask for, best quality first."""
    bytes_per_variant: Mapping[Variant, int] = field(default_factory=dict[Variant, int])
    """Bytes of weights that one decode step reads."""
    speculations: tuple[Speculation, ...] = ()
    """Ways to draft that a plan may ask for."""
    device: str = "cpu"
    device_name: str = ""
    """The processor, for keying saved profiles."""
    speed_facts: Mapping[str, str] = field(default_factory=dict[str, str])
    """What ``fingerprint`` is the digest of, by name, so that people can be told what has changed."""
    has_chat_template: bool = True


class Backend(Protocol):
    """Runs plans. Every method may be called from any event loop and any thread."""

    @property
    def name(self) -> str:
        """Unique among a client's backends; shown in decisions and traces."""
        ...

    async def start(self, on_progress: OnProgress | None = None) -> ModelInfo:
        """Load what is to be served; calling it again returns at once.

        Raises:
            ModelError: the model cannot be found, read or run.
            MissingExtraError: a part that it needs is not installed.
        """
        ...

    async def prepare(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Prompt:
        """Render and tokenize a conversation.

        Raises:
            InvalidValueError: no messages, or messages that the template refuses.
        """
        ...

    async def snapshot(self, prompt: Prompt, *, salt: str = "", adapter: str | None = None) -> Snapshot:
        """The state now, with how much of ``prompt`` is cached. Does not wait for a running step."""
        ...

    def submit(self, request: GenerationRequest, plan: Plan) -> AsyncIterator[Chunk]:
        """Run a generation. Each choice ends with exactly one chunk that has ``finish``.

        Closing the iterator (``aclose``, cancellation of the task, or dropping it) cancels the request:
        by the next step nothing of it runs and its KV blocks are free.

        Raises, from the first ``__anext__`` at the earliest:
            InvalidValueError: the request or plan does not suit the model; nothing was run.
            DeadlineExpiredError: the plan's deadline had passed; nothing was run.
            StallError, EngineDiedError, BackendError: with the text so far.
        """
        ...

    async def score(self, request: ScoreRequest, plan: Plan) -> ScoreResult:
        """Log probability of each option given the prompt, in one prefill. Errors as ``submit``."""
        ...

    async def aclose(self) -> None:
        """End all that runs and give back what is held; calling it again does nothing."""
        ...


@runtime_checkable
class Pinning(Protocol):
    """What a backend may offer beside ``Backend``: keeping a prompt's prefix cached while a tool runs."""

    def pin(
        self,
        pin_id: str,
        prompt: Prompt,
        *,
        hold_s: float,
        salt: str = "",
        adapter: str | None = None,
    ) -> None:
        """Keep what is cached of the prompt from eviction for ``hold_s`` at most. Never blocks.

        A share of the cache is pinned at most; beyond it, and where nothing is cached, this does nothing.
        A pin of the same id is replaced; all end with the worker. ``Snapshot.pinned_blocks`` tells what is
        held.
        """
        ...

    def unpin(self, pin_id: str) -> None:
        """Let it be evicted again; an unknown pin is ignored. Never blocks."""
        ...


@runtime_checkable
class Comparing(Protocol):
    """What a backend may offer beside ``Backend``: how near its variants are to one of them on a text."""

    async def compare(self, request: FidelityRequest) -> Mapping[Variant, Fidelity]:
        """What each variant came to, the reference first. Streams wait for a stretch of it at a time.

        Raises:
            InvalidValueError: the text does not suit the model; nothing was run.
            EngineDiedError, BackendError: it could not be run to its end.
        """
        ...


@runtime_checkable
class VariantChanging(Protocol):
    """What a backend may offer beside ``Backend``: moving a running stream to another variant."""

    def change_variant(self, request_id: str, variant: Variant) -> None:
        """Run the request as ``variant`` from its next token on. Never blocks.

        Nothing happens where the request has ended. A step policy leaves the stream there.
        """
        ...


@runtime_checkable
class Remembering(Protocol):
    """What a backend may offer beside ``Backend``: drafting from what was said in a request's session."""

    def end_session(self, session: str, *, salt: str = "") -> None:
        """Forget what was said in it; an unknown one is ignored. Never blocks."""
        ...
