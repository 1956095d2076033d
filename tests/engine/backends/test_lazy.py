"""Variants that are loaded when a plan first asks for them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from paceline_engine.backends.base import ModelInfo
from paceline_engine.backends.embedded import EmbeddedBackend, EmbeddedConfig
from paceline_engine.errors import ModelLoadError
from paceline_engine.mode import Mode, Variant
from paceline_engine.plan import Plan
from paceline_engine.quant.store import WeightStore
from paceline_engine.request import GenerationRequest
from paceline_engine.timeline import VARIANT_LOADED

VARIANTS = (Variant.BF16, Variant.FP8, Variant.INT4)


def run(folder: Path, *, lazy: bool) -> tuple[ModelInfo, set[str], dict[Variant, tuple[int, ...]]]:
    """What is served, the stages of the start, and what each variant says."""
    stages: set[str] = set()

    async def main() -> tuple[ModelInfo, dict[Variant, tuple[int, ...]]]:
        config = EmbeddedConfig(model=str(folder), variants=VARIANTS, host="thread", n_threads=1, lazy=lazy)
        backend = EmbeddedBackend(config)
        try:
            info = await backend.start(lambda progress: stages.add(progress.stage))
            prompt = await backend.prepare([{"role": "user", "content": "the weather in Oslo is"}])
            said: dict[Variant, tuple[int, ...]] = {}
            for variant in VARIANTS:
                request = GenerationRequest(id=str(variant), prompt=prompt, ignore_eos=True)
                plan = Plan(mode=Mode(variant=variant, prefix_cache=False), max_tokens=6)
                chunks = [chunk async for chunk in backend.submit(request, plan)]
                said[variant] = tuple(token for chunk in chunks for token in chunk.token_ids)
        finally:
            await backend.aclose()
        return info, said

    return (lambda found: (found[0], stages, found[1]))(asyncio.run(main()))


def test_lazy_variants_say_what_loaded_ones_do(tiny_model: Any) -> None:
    """The first start converts with progress; a lazy one converts nothing and serves the same."""
    folder = tiny_model("gemma3").safetensors
    eager, first_stages, expected = run(folder, lazy=False)
    lazy, stages, found = run(folder, lazy=True)
    assert "convert" in first_stages
    assert "convert" not in stages
    assert found == expected
    assert lazy == eager


def test_a_load_fails_only_who_needs_it_and_is_told_in_snapshot_and_timeline(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a stream that goes on, another ends with the error of its load; a later one loads it."""
    folder = tiny_model("gemma3").safetensors
    run(folder, lazy=False)
    matrices, torn = WeightStore.matrices, [True]

    def tear(self: WeightStore, variant: Variant, **options: Any) -> Any:
        if variant is Variant.INT4 and torn:
            raise ModelLoadError("tiny", reason="its file is torn", remedy="fetch it again")
        return matrices(self, variant, **options)

    monkeypatch.setattr(WeightStore, "matrices", tear)

    async def main() -> None:
        config = EmbeddedConfig(model=str(folder), variants=VARIANTS, host="thread", n_threads=1, lazy=True)
        backend = EmbeddedBackend(config)
        try:
            await backend.start()
            prompt = await backend.prepare([{"role": "user", "content": "the weather in Oslo is"}])
            assert set((await backend.snapshot(prompt)).loading_s) == set(VARIANTS)

            async def say(variant: Variant, n: int) -> list[Any]:
                request = GenerationRequest(id=f"{variant}{n}", prompt=prompt, ignore_eos=True)
                plan = Plan(mode=Mode(variant=variant), max_tokens=n)
                return [chunk async for chunk in backend.submit(request, plan)]

            going, failing = await asyncio.gather(
                say(Variant.BF16, 40), say(Variant.INT4, 5), return_exceptions=True
            )
            assert isinstance(failing, ModelLoadError)
            assert isinstance(going, list)
            assert sum(len(chunk.token_ids) for chunk in going) == 40
            torn.clear()
            chunks = await say(Variant.INT4, 6)
            events = chunks[-1].finish.timeline.events
            assert [event.name for event in events] == [VARIANT_LOADED]
            assert set((await backend.snapshot(prompt)).loading_s) == {Variant.FP8}
        finally:
            await backend.aclose()

    asyncio.run(main())
