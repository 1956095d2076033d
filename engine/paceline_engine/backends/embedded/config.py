"""Settings of the embedded backend, checked when they are given."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline_engine.backends.embedded.cores import usable_cores
from paceline_engine.errors import InvalidValueError
from paceline_engine.mode import Drafter, Speculation, Variant

DEFAULT_KV_TOKENS = 16_384
_SELF_DRAFTS = 4
_MOST_THREADS = 1024
_MOST = 1 << 40
_NGRAM_DRAFTS = 8
"""Drafts of repeated text cost only their verification."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedConfig:
    """What the embedded backend serves, and with what."""

    model: str
    """A path, the name of an installed model package, or a hub id."""
    name: str = "embedded"
    """Unique among a client's backends."""
    device: str = "auto"
    """``cpu``, ``cuda``, ``cuda:1``, or ``auto``: CUDA where there is one."""
    variants: tuple[Variant, ...] = (Variant.BF16, Variant.INT8, Variant.INT4)
    """What plans may ask for, best quality first."""
    lazy: bool = False
    """Load a variant when it is first used: less memory, and a slightly quicker start. It loads beside the
    steps: streams of other variants go on, and the first request for it waits until it is there. A load that
    fails ends the requests that wait for it. What was never converted is converted at the start all the same.
    What all grammars share is then built with the first one, for which all streams wait half a second."""
    speculations: tuple[Speculation, ...] | None = None
    """Ways to draft that are offered to plans. Default: ``int4`` drafting for the others, with repeated text
    first, where it is loaded beside another variant; and repeated text alone."""
    adapters: Mapping[str, str] = field(default_factory=dict[str, str])
    """LoRA adapters to serve from the start, as folders that PEFT saved, by the names that requests give
    them. ``EmbeddedBackend.load_adapter`` adds others later."""
    kv_tokens: int | None = None
    """Tokens that the KV cache holds. Default: 16,384, less where the model's context is small."""
    n_blocks: int | None = None
    """KV blocks, instead of ``kv_tokens``."""
    block_size: int = 16
    """Tokens per KV block."""
    n_threads: int | None = None
    """Threads of one step. Default: the physical cores that this process may use."""
    max_prefill_tokens_per_step: int = 256
    """Most prompt tokens run in one step."""
    max_sequences: int = 16
    """Most sequences that run at once."""
    max_pinned_share: float = 0.5
    """Share of the KV blocks that pinned prefixes may keep from eviction."""
    step_policy: str | None = None
    """``module:factory``, imported in the worker and called with ``step_policy_numbers``; it gives a
    ``schedule.base.StepPolicy``. Default: the earliest deadline first."""
    step_policy_numbers: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Plain data that reaches the worker by pickle; ``EmbeddedBackend.renew_step_policy`` replaces it."""
    host: Literal["process", "thread"] = "process"
    """``process``: a worker of its own, so that busy Python threads here cannot stretch a step.
    ``thread``: inside this process, for debuggers and for places where no process may be started."""
    start_timeout_s: float = 300.0
    """Longest wait for the worker to load the model."""
    close_timeout_s: float = 2.0
    """How long ``aclose`` waits for the worker before it kills it."""
    answer_timeout_s: float = 10.0
    """Longest wait for a snapshot."""
    deadline_grace_s: float = 1.0
    """How long past a hard deadline the engine may take to end a generation before the client does."""
    max_restarts_per_minute: int = 3
    """Workers that died within a minute before calls fail instead of starting another."""
    cache_dir: str | None = None
    """Where converted weights are kept. Default: the user's cache folder."""
    source: str = "paceline_engine.backends.embedded.source"
    """Module with ``open_engine`` and ``open_tokenizer``; tests name ``embedded.scripted`` here."""
    source_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Read by the source alone."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "variants", _variants(self.variants))
        if self.speculations is not None:
            object.__setattr__(self, "speculations", tuple(self.speculations))
            _check_speculations(self.speculations, self.variants)
        for name in ("step_policy_numbers", "source_options"):
            # A copy of our own: later changes of the caller's must not reach a worker to come.
            object.__setattr__(self, name, dict(getattr(self, name)))
        object.__setattr__(self, "adapters", checked_adapters(self.adapters))
        for name in ("model", "name", "source"):
            if not getattr(self, name):
                raise InvalidValueError(
                    name, observed=getattr(self, name), limit="a non-empty text", remedy="name one"
                )
        _check_counts(self)
        _check_times(self)
        if not 0 <= self.max_pinned_share <= 1:
            raise InvalidValueError(
                "max_pinned_share",
                observed=self.max_pinned_share,
                limit="between 0 and 1",
                remedy="leave it out for the default, or use 0 for no pins",
            )
        if self.kv_tokens is not None and self.n_blocks is not None:
            raise InvalidValueError(
                "n_blocks", observed=self.n_blocks, limit="given without kv_tokens", remedy="give one of them"
            )
        if self.step_policy is not None and not all(self.step_policy.partition(":")):
            raise InvalidValueError(
                "step_policy",
                observed=self.step_policy,
                limit="of the form 'module:factory'",
                remedy="name a factory that the worker can import",
            )
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise InvalidValueError(
                "device",
                observed=self.device,
                limit="'auto', 'cpu', 'cuda' or one CUDA device, such as 'cuda:1'",
                remedy="'auto' takes CUDA where there is one, else the CPU",
            )
        if self.host not in ("process", "thread"):
            raise InvalidValueError(
                "host",
                observed=self.host,
                limit="'process' or 'thread'",
                remedy="'process' keeps steps apart from this process's threads",
            )

    @property
    def offered_speculations(self) -> tuple[Speculation, ...]:
        """``speculations`` with its default filled in."""
        if self.speculations is not None:
            return self.speculations
        ngram = Speculation(drafter=Drafter.NGRAM, max_draft_tokens=_NGRAM_DRAFTS)
        if Variant.INT4 not in self.variants or len(self.variants) == 1:
            return (ngram,)
        with_model = Speculation(
            drafter=Drafter.SELF, max_draft_tokens=_SELF_DRAFTS, draft_variant=Variant.INT4
        )
        return (with_model, ngram)

    @property
    def threads(self) -> int:
        """``n_threads`` with its default filled in."""
        return usable_cores() if self.n_threads is None else self.n_threads

    def blocks(self, *, context_tokens: int) -> int:
        """KV blocks to allocate for a model of this context: no more than all sequences could fill."""
        if self.n_blocks is not None:
            return self.n_blocks
        fill = context_tokens * self.max_sequences
        tokens = min(DEFAULT_KV_TOKENS, fill) if self.kv_tokens is None else self.kv_tokens
        return max(1, math.ceil(tokens / self.block_size))


def _variants(given: object) -> tuple[Variant, ...]:
    remedy = f"choose from {', '.join(Variant)}"
    if isinstance(given, str):
        given = (given,)
    try:
        variants = tuple(Variant(item) for item in given)  # type: ignore[attr-defined]  # pyright: ignore
    except (TypeError, ValueError):
        raise InvalidValueError(
            "variants", observed=given, limit="made of known variants", remedy=remedy
        ) from None
    if not variants or len(set(variants)) < len(variants):
        raise InvalidValueError(
            "variants", observed=given, limit="at least one, each of them once", remedy=remedy
        )
    return variants


def checked_adapters(given: object) -> dict[str, str]:
    """Names and absolute paths, of a mapping of names to paths.

    Raises:
        InvalidValueError: it is no such mapping.
    """
    try:
        found = {name: os.path.abspath(os.fspath(path)) for name, path in given.items()}  # type: ignore[attr-defined]  # pyright: ignore
    except (AttributeError, TypeError, ValueError):
        found = {"": ""}
    if not all(isinstance(name, str) and name for name in found):
        raise InvalidValueError(
            "adapters",
            observed=given,
            limit="a mapping of non-empty names to the paths of folders",
            remedy="give each adapter the name that requests will use, as {'support': '/path/to/adapter'}",
        )
    return found


def _check_speculations(speculations: tuple[Speculation, ...], variants: tuple[Variant, ...]) -> None:
    for speculation in speculations:
        if speculation.draft_variant not in (None, *variants):
            raise InvalidValueError(
                "speculations",
                observed=f"drafts of {speculation.draft_variant}",
                limit=f"drafts of {', '.join(variants)}",
                remedy="load the variant that is to draft, or leave speculations out for the default",
            )


def _check_counts(config: EmbeddedConfig) -> None:
    counts = ("kv_tokens", "n_blocks", "block_size", "n_threads")
    for name in (*counts, "max_prefill_tokens_per_step", "max_sequences", "max_restarts_per_minute"):
        value = getattr(config, name)
        least = 0 if name == "max_restarts_per_minute" else 1
        most = _MOST_THREADS if name == "n_threads" else _MOST
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (whole and least <= value <= most):
            raise InvalidValueError(
                name,
                observed=value,
                limit=f"a whole number from {least} to {most}",
                remedy="leave it out for the default",
            )


def _check_times(config: EmbeddedConfig) -> None:
    for name in ("start_timeout_s", "close_timeout_s", "answer_timeout_s", "deadline_grace_s"):
        value = getattr(config, name)
        if not (math.isfinite(value) and value > 0):
            raise InvalidValueError(
                name,
                observed=value,
                limit="a finite number of seconds above 0",
                remedy="leave it out for the default",
            )
