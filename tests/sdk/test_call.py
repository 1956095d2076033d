"""What a call may take of a backend."""

from __future__ import annotations

import asyncio

import pytest

import paceline
from paceline.call import default_max_tokens
from paceline.errors import PromptTooLongError
from paceline_engine.backends.embedded import EmbeddedBackend, EmbeddedConfig


def toy(**settings):
    """A backend whose tokens are bytes, with 4 blocks of 16 tokens."""
    source = "paceline_engine.backends.embedded.scripted"
    return EmbeddedBackend(
        EmbeddedConfig(model="toy", host="thread", n_blocks=4, block_size=16, source=source, **settings)
    )


def client_of(backend):
    return paceline.AsyncClient(backend=backend, profile="assume", tracing=False)


def test_without_a_cap_the_output_fits_the_kv_cache():
    """Where the budgets leave room for more than the KV cache does, the cache sets the cap."""

    async def main():
        slo = paceline.SLO(tpot_ms=1, e2e_ms=100_000)
        async with client_of(toy()) as client, client.turn(slo=slo) as turn:
            return await turn.plan("x" * 30)

    decision = asyncio.run(main())
    assert decision.plan.max_tokens == 64 + 1 - 30


@pytest.mark.parametrize("call", ["plan", "generate", "choose"])
def test_a_prompt_that_never_fits_is_refused_before_it_is_planned(call):
    """Plan and run give the same error, and a shorter call of the turn works."""

    async def main():
        options = {"options": ["a", "b"]} if call == "choose" else {}
        async with client_of(toy()) as client, client.turn() as turn:
            with pytest.raises(PromptTooLongError, match="KV cache"):
                await getattr(turn, call)("x" * 65, **options)
            if call != "choose":
                with pytest.raises(PromptTooLongError, match="60 for max_tokens"):
                    await getattr(turn, call)("x" * 20, max_tokens=60)
            return await turn.generate("x" * 8, max_tokens=4)

    assert asyncio.run(main()).text


def test_a_cap_that_may_be_shortened_need_not_fit():
    """Under ``shorten`` the cap is a wish, and the budgets lower it to what fits."""

    async def main():
        slo = paceline.SLO(ttft_ms=None, tpot_ms=None, e2e_ms=5000, on_infeasible="shorten")
        async with client_of(toy()) as client, client.turn(slo=slo) as turn:
            return await turn.plan("x" * 20, max_tokens=60_000)

    decision = asyncio.run(main())
    assert decision.action == "shorten"
    assert decision.plan.max_tokens < 60_000


def test_absurd_budgets_give_some_cap():
    """No quotient of budgets is too large for a cap."""
    assert default_max_tokens(200, 5e-324, 2000) > 10**6
    assert default_max_tokens(None, 1e-300, 1e308) > 10**6
    assert default_max_tokens(1e308, 30, 2000) == 34


def test_a_long_first_token_leaves_room_for_others() -> None:
    """Where TTFT is most of E2E, half of E2E is left for the other tokens of the default cap."""
    assert default_max_tokens(200, 30, 2000) == 61
    assert default_max_tokens(200, 30, 200) == 4
    assert default_max_tokens(200, 30, 220) == 4
