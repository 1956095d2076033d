"""Many callers at once on one worker, who leave in every way: in the end nothing of theirs is left."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from typing import Any

import pytest

from paceline_engine.backends.embedded import EmbeddedBackend, EmbeddedConfig
from paceline_engine.errors import EngineDiedError, PacelineError
from paceline_engine.mode import Drafter, Mode, Speculation, Variant
from paceline_engine.plan import Plan
from paceline_engine.request import GenerationRequest, Prompt, SamplingParams

VARIANTS = (Variant.FP32, Variant.INT8, Variant.INT4)
SPECULATIONS = (
    None,
    Speculation(drafter=Drafter.NGRAM, max_draft_tokens=4),
    Speculation(drafter=Drafter.SELF, max_draft_tokens=3, draft_variant=Variant.INT4),
)
N_CALLERS = 48


@pytest.mark.parametrize("killed", [False, True])
def test_a_storm_leaves_nothing_behind(tiny_model: Any, killed: bool) -> None:
    """Slow readers, leavers, movers and pins in a tiny cache, and variants that load meanwhile; also where
    the worker is killed in the middle. The next request runs as alone.
    """
    asyncio.run(_storm(str(tiny_model("gemma3").safetensors), killed=killed))


async def _storm(model: str, *, killed: bool) -> None:
    rng = random.Random(5)
    config = EmbeddedConfig(model=model, variants=VARIANTS, n_threads=1, n_blocks=24, lazy=True)
    backend = EmbeddedBackend(config)
    try:
        await backend.start()
        ids = (await backend.prepare([{"role": "user", "content": "the weather in Oslo is cold"}])).token_ids
        expected, _ = await _say(backend, "alone", ids, random.Random(0), leaves_after=99)
        deaths: list[PacelineError] = []

        async def caller(number: int) -> None:
            own = random.Random(number)
            prompt = (*ids, *(own.randrange(10, 60) for _ in range(own.randint(0, 20))))
            await asyncio.sleep(own.random() * 0.5)
            try:
                leaves = own.choice([0, 1, 3, 99, 99])
                task = _say(backend, f"caller {number}", prompt, own, leaves_after=leaves)
                await asyncio.wait_for(task, own.choice([0.05, 0.5, 30.0]))
            except TimeoutError:
                pass
            except EngineDiedError as error:
                deaths.append(error)

        callers = [asyncio.create_task(caller(number)) for number in range(N_CALLERS)]
        if killed:
            await _kill_under_a_stream(backend, ids)
        await asyncio.gather(*callers)
        assert killed or not deaths
        backend.unpin("p")
        snapshot = await backend.snapshot(Prompt(messages=(), token_ids=ids, n_tokens=len(ids)))
        async with asyncio.timeout(20):  # an abort is carried out beside the step that runs
            while snapshot.running or snapshot.waiting or snapshot.free_blocks != snapshot.total_blocks:
                await asyncio.sleep(0.01)
                snapshot = await backend.snapshot(Prompt(messages=(), token_ids=ids, n_tokens=len(ids)))
        assert snapshot.pinned_blocks == 0
        again, _ = await _say(backend, "after", ids, rng, leaves_after=99, plain=True)
        assert again == expected
    finally:
        await backend.aclose()


async def _kill_under_a_stream(backend: EmbeddedBackend, ids: tuple[int, ...]) -> None:
    """Kill the worker once a long stream has begun; its reader is told so, with the text so far."""
    request = GenerationRequest(
        id="victim", prompt=Prompt(messages=(), token_ids=ids, n_tokens=len(ids)), ignore_eos=True
    )
    stream = backend.submit(request, Plan(mode=Mode(variant=VARIANTS[0]), max_tokens=300))
    texts = [(await anext(stream)).text]
    pid = backend.worker_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)

    async def read_on() -> None:
        async for chunk in stream:
            texts.append(chunk.text)  # noqa: PERF401  # what came before the error is wanted

    with pytest.raises(EngineDiedError) as told:
        await read_on()
    assert told.value.partial_text == "".join(texts)


async def _say(
    backend: EmbeddedBackend,
    name: str,
    ids: tuple[int, ...],
    rng: random.Random,
    *,
    leaves_after: int,
    plain: bool = False,
) -> tuple[list[int], int]:
    """Read a stream, slowly or not, moving and pinning on the way; plainly where it is to be compared."""
    compared = plain or name == "alone"
    mode = (
        Mode(variant=VARIANTS[0])
        if compared
        else Mode(
            variant=rng.choice(VARIANTS), speculation=rng.choice(SPECULATIONS), mix_cache=rng.random() < 0.3
        )
    )
    sampling = SamplingParams() if compared else SamplingParams(temperature=rng.choice([0.0, 1.0]), seed=1)
    request = GenerationRequest(
        id=name,
        prompt=Prompt(messages=(), token_ids=ids, n_tokens=len(ids)),
        sampling=sampling,
        ignore_eos=True,
        n=1 if compared else rng.choice([1, 1, 2]),
        salt="" if compared else rng.choice(["", "t"]),
        session="" if compared else rng.choice(["", "s"]),
    )
    stream = backend.submit(request, Plan(mode=mode, max_tokens=24, stall_limit_s=30.0))
    found: list[int] = []
    n_chunks = 0
    async for chunk in stream:
        found += chunk.token_ids
        n_chunks += 1
        if n_chunks > leaves_after:
            break
        if not compared and rng.random() < 0.2:
            backend.change_variant(name, rng.choice(VARIANTS))
        if not compared and rng.random() < 0.1:
            backend.pin("p", request.prompt, hold_s=0.5)
        if not compared and rng.random() < 0.1:
            await asyncio.sleep(0.02)
    return found, n_chunks
