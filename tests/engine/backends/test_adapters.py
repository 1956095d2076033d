"""LoRA adapters through the backend: from the start, loaded and reloaded later, kept by new workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline_engine.backends.embedded import EmbeddedBackend, EmbeddedConfig
from paceline_engine.errors import (
    EngineDiedError,
    InvalidValueError,
    ModelNotFoundError,
    UnknownOptionError,
    UnsupportedModelError,
)
from paceline_engine.mode import Mode, Variant
from paceline_engine.plan import Plan
from paceline_engine.request import GenerationRequest

Making = Callable[..., Any]


@pytest.fixture
def config(tiny_model: Making) -> Callable[..., EmbeddedConfig]:
    def make(**settings: Any) -> EmbeddedConfig:
        folder = str(tiny_model("llama").safetensors)
        return EmbeddedConfig(model=folder, variants=(Variant.BF16,), n_threads=1, **settings)

    return make


async def say(backend: EmbeddedBackend, adapter: str | None = None) -> tuple[int, ...]:
    prompt = await backend.prepare([{"role": "user", "content": "the weather in Oslo is"}])
    await backend.snapshot(prompt, adapter=adapter)
    request = GenerationRequest(id=os.urandom(4).hex(), prompt=prompt, adapter=adapter, ignore_eos=True)
    plan = Plan(mode=Mode(variant=Variant.BF16), max_tokens=8)
    return tuple([token async for chunk in backend.submit(request, plan) for token in chunk.token_ids])


async def kill_worker(backend: EmbeddedBackend) -> None:
    pid = backend.worker_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    while backend.worker_pid == pid:
        with contextlib.suppress(EngineDiedError):
            await say(backend)


def test_adapters_come_and_go(
    config: Callable[..., EmbeddedConfig], tiny_model: Making, tiny_adapter: Making, tmp_path: Path
) -> None:
    """One of the configuration, one loaded later, new weights under its name, and none once it is unloaded;
    what cannot be loaded leaves all as it was, and a new worker serves the same."""
    folders = [tiny_adapter(tiny_model("llama").reference, seed=seed).folder for seed in range(3)]
    other = tiny_adapter(tiny_model("gemma3").reference).folder

    async def main() -> None:
        backend = EmbeddedBackend(config(adapters={"first": str(folders[0])}))
        try:
            base, first = await say(backend), await say(backend, "first")
            assert await backend.load_adapter("later", folders[1]) == ("first", "later")
            later = await say(backend, "later")
            assert len({base, first, later}) == 3
            for name, folder, error in (
                ("later", tmp_path, ModelNotFoundError),
                ("later", other, UnsupportedModelError),
                ("", folders[0], InvalidValueError),
            ):
                with pytest.raises(error):
                    await backend.load_adapter(name, folder)
            assert await say(backend, "later") == later
            await backend.load_adapter("later", folders[2])
            reloaded = await say(backend, "later")
            assert reloaded not in (base, first, later)

            await kill_worker(backend)
            found = [await say(backend, name) for name in (None, "first", "later")]
            assert found == [base, first, reloaded]
            assert await backend.unload_adapter("first") == ("later",)
            with pytest.raises(UnknownOptionError, match="later"):
                await say(backend, "first")
            with pytest.raises(UnknownOptionError, match="first"):
                await backend.unload_adapter("first")
            assert await say(backend) == base
        finally:
            await backend.aclose()

    asyncio.run(main())


def test_a_start_with_a_bad_adapter_fails(config: Callable[..., EmbeddedConfig], tmp_path: Path) -> None:
    """The start says which adapter is not there."""

    async def main() -> None:
        backend = EmbeddedBackend(config(adapters={"gone": tmp_path / "gone"}, host="thread"))
        try:
            with pytest.raises(ModelNotFoundError, match="gone"):
                await backend.start()
        finally:
            await backend.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("adapters", [None, "text", ["a"], {"": "x"}, {3: "x"}, {"a": None}, {"a": 3}])
def test_settings_that_are_no_adapters(config: Callable[..., EmbeddedConfig], adapters: Any) -> None:
    """Anything but names and paths is refused when it is given."""
    with pytest.raises(InvalidValueError, match="adapters"):
        config(adapters=adapters)
