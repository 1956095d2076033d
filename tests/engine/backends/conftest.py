"""Backends to test: a scripted engine on a thread and in a process, and a tiny real model in a process."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from paceline_engine.backends.embedded import EmbeddedBackend, EmbeddedConfig
from paceline_engine.chunk import Chunk
from paceline_engine.mode import Mode, Variant
from paceline_engine.plan import Plan
from paceline_engine.request import GenerationRequest, Prompt, ScoreRequest

SCRIPTED = "paceline_engine.backends.embedded.scripted"

_ids = itertools.count()


@dataclass(slots=True)
class Harness:
    """Makes backends of one kind, and requests for them."""

    settings: dict[str, Any]
    variant: Variant = Variant.BF16
    text: str = "the weather in Oslo is"
    longest: int = 2000
    """A cap that takes far longer than a test waits, and fits the context."""
    shared: EmbeddedBackend | None = None
    """One that all tests of the kind use, where starting takes seconds."""
    backends: list[EmbeddedBackend] = field(default_factory=list)

    def any_backend(self) -> EmbeddedBackend:
        """A backend that the test leaves usable, perhaps started before."""
        return self.backend() if self.shared is None else self.shared

    def backend(self, script: dict[str, Any] | None = None, **settings: Any) -> EmbeddedBackend:
        merged = self.settings | settings
        if script:
            merged["source_options"] = merged.get("source_options", {}) | script
        backend = EmbeddedBackend(EmbeddedConfig(**merged))
        self.backends.append(backend)
        return backend

    async def prompt(self, backend: EmbeddedBackend, text: str | None = None) -> Prompt:
        return await backend.prepare([{"role": "user", "content": self.text if text is None else text}])

    def plan(self, max_tokens: int = 8, **settings: Any) -> Plan:
        return Plan(mode=Mode(variant=self.variant), max_tokens=max_tokens, **settings)

    async def stream(
        self,
        backend: EmbeddedBackend,
        text: str | None = None,
        *,
        max_tokens: int = 8,
        plan: Plan | None = None,
        id: str | None = None,
        **settings: Any,
    ) -> AsyncIterator[Chunk]:
        """A stream that never ends by the model's own end tokens."""
        request = GenerationRequest(
            id=f"r{next(_ids)}" if id is None else id,
            prompt=await self.prompt(backend, text),
            ignore_eos=True,
            **settings,
        )
        return backend.submit(request, plan or self.plan(max_tokens))

    async def run(self, backend: EmbeddedBackend, text: str | None = None, **settings: Any) -> list[Chunk]:
        """All chunks of one generation."""
        return [chunk async for chunk in await self.stream(backend, text, **settings)]

    async def score_request(self, backend: EmbeddedBackend, *options: str) -> ScoreRequest:
        return ScoreRequest(id=f"s{next(_ids)}", prompt=await self.prompt(backend), options=options)

    async def free_blocks(self, backend: EmbeddedBackend) -> int:
        snapshot = await backend.snapshot(await self.prompt(backend))
        assert snapshot.free_blocks is not None
        return snapshot.free_blocks

    async def settles_at(self, backend: EmbeddedBackend, free_blocks: int) -> None:
        """Wait until that many blocks are free and nothing runs; fail when it takes seconds."""
        limit_s = time.monotonic() + 5.0
        while True:
            snapshot = await backend.snapshot(await self.prompt(backend))
            if (snapshot.free_blocks, snapshot.running, snapshot.waiting) == (free_blocks, 0, 0):
                return
            assert time.monotonic() < limit_s, f"not free after 5 s: {snapshot}"
            await asyncio.sleep(0.01)


HarnessFactory = Callable[[str], Harness]


@pytest.fixture
def make_harness(request: pytest.FixtureRequest) -> Iterator[HarnessFactory]:
    """A harness of a kind: ``thread``, ``process`` (both scripted) or ``model``."""
    made: list[Harness] = []

    def make(kind: str) -> Harness:
        if kind == "model":
            harness = Harness(
                request.getfixturevalue("tiny_settings"),
                variant=Variant.FP32,
                longest=400,
                shared=request.getfixturevalue("tiny_backend"),
            )
        else:
            harness = Harness({"model": "script", "source": SCRIPTED, "host": kind})
        made.append(harness)
        return harness

    yield make
    for harness in made:
        for backend in harness.backends:
            asyncio.run(backend.aclose())


@pytest.fixture(scope="session")
def tiny_settings(tiny_model: Callable[..., Any]) -> dict[str, Any]:
    """Settings that serve a tiny random model."""
    return {
        "model": str(tiny_model("llama").safetensors),
        "variants": (Variant.FP32,),
        "device": "cpu",
        "n_threads": 1,
        "n_blocks": 256,
    }


@pytest.fixture(scope="session")
def tiny_backend(tiny_settings: dict[str, Any]) -> Iterator[EmbeddedBackend]:
    """The tiny model in a worker that all tests share."""
    backend = EmbeddedBackend(EmbeddedConfig(**tiny_settings))
    yield backend
    asyncio.run(backend.aclose())


@pytest.fixture(params=["thread", "process", "model"])
def harness(request: pytest.FixtureRequest, make_harness: HarnessFactory) -> Harness:
    """Every kind in turn: what is tested with it is the contract of all."""
    return make_harness(request.param)


@pytest.fixture(params=["thread", "process"])
def scripted(request: pytest.FixtureRequest, make_harness: HarnessFactory) -> Harness:
    """The scripted engine, in both hosts."""
    return make_harness(request.param)


@pytest.fixture
def process(make_harness: HarnessFactory) -> Harness:
    """The scripted engine in a worker process."""
    return make_harness("process")
