"""Sessions through the step loop: what is drafted in them changes nothing."""

from __future__ import annotations

import asyncio
from typing import Any

from paceline_engine.backends.base import Remembering
from paceline_engine.backends.embedded import EmbeddedBackend, EmbeddedConfig
from paceline_engine.mode import Drafter, Mode, Speculation, Variant
from paceline_engine.plan import Plan
from paceline_engine.request import GenerationRequest

NGRAM = Mode(variant=Variant.FP32, speculation=Speculation(drafter=Drafter.NGRAM, max_draft_tokens=8))


def test_a_session_changes_no_token_and_may_be_ended_at_any_time(tiny_model: Any) -> None:
    """The same answer in a session, in it again, beside its end and without one."""

    async def main() -> None:
        config = EmbeddedConfig(
            model=str(tiny_model("gemma3").safetensors), variants=(Variant.FP32,), host="thread", n_threads=1
        )
        backend = EmbeddedBackend(config)
        assert isinstance(backend, Remembering)
        backend.end_session("before any start")
        try:
            await backend.start()
            prompt = await backend.prepare([{"role": "user", "content": "the weather in Oslo is"}])

            async def say(name: str, session: str, *, end: bool = False) -> tuple[int, ...]:
                request = GenerationRequest(id=name, prompt=prompt, session=session, ignore_eos=True)
                found: list[int] = []
                async for chunk in backend.submit(request, Plan(mode=NGRAM, max_tokens=24)):
                    found += chunk.token_ids
                    if end:
                        backend.end_session("s")
                return tuple(found)

            expected = await say("none", "")
            assert await say("first", "s") == expected
            assert await say("again", "s") == expected
            assert await say("ended", "s", end=True) == expected
            assert await say("anew", "s") == expected
        finally:
            await backend.aclose()

    asyncio.run(main())
