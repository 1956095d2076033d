from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from paceline_engine.chunk import FinishReason
from paceline_engine.errors import PromptTooLongError
from paceline_engine.mode import Variant
from paceline_engine.request import SamplingParams

MakeBench = Callable[..., Any]


def _random_request(rng: random.Random, bench: Any) -> dict[str, Any]:
    prefix = [rng.randrange(2), 5, 6, 7, 8, 9][: rng.randint(1, 6)]
    sampling = SamplingParams(
        temperature=rng.choice([0.0, 0.9, 1.5]),
        top_p=rng.choice([1.0, 0.8]),
        top_k=rng.choice([0, 5]),
        repetition_penalty=rng.choice([1.0, 1.4]),
        frequency_penalty=rng.choice([0.0, 0.3]),
        min_tokens=rng.choice([0, 3]),
        logit_bias=rng.choice([{}, {63: 6.0}]),
        seed=rng.randrange(100),
    )
    return {
        "prompt": prefix + [rng.randrange(60) for _ in range(rng.randint(0, 9))],
        "plan": bench.plan(
            rng.randint(1, 20),
            rng.choice([Variant.BF16, Variant.INT4]),
            batch_cap=rng.choice([1, 2, 8, 8]),
            prefix_cache=rng.random() < 0.8,
        ),
        "sampling": sampling,
        "n": rng.choice([1, 1, 1, 2, 3]),
        "stop": rng.choice([(), ("A", "BC"), ("x",)]),
        "salt": rng.choice(["", "t"]),
    }


@pytest.mark.parametrize("seed", range(8))
def test_soak(make_bench: MakeBench, seed: int) -> None:
    """Random requests with aborts and a pool too small for them all: solo outputs, and no block lost."""
    rng = random.Random(seed)
    bench = make_bench(
        n_blocks=rng.choice([10, 12, 20]), max_prefill_tokens_per_step=rng.choice([1, 5, 64]), max_sequences=5
    )
    requests: dict[str, dict[str, Any]] = {}
    aborted: set[str] = set()
    for i in range(24):
        request = _random_request(rng, bench)
        bench.submit(str(i), **request)
        requests[str(i)] = request
        if rng.random() < 0.3:
            victim = rng.choice(list(requests))
            aborted.add(victim)
            bench.engine.abort(victim)
        if rng.random() < 0.2:
            bench.score(f"s{i}", request["prompt"], ("ABC", "D", "ABD"))
        bench.step(rng.randint(0, 4))
    out = bench.run()
    assert not out.errors
    assert bench.free == bench.runner.n_blocks
    pool = bench.engine._pool
    assert not any(pool.references(block) for block in range(pool.n_blocks))
    pool.evict_cached()
    assert len(pool._index) == 0
    for name, request in requests.items():
        solo = make_bench(n_blocks=200)
        solo.submit(name, **request)
        solo.run()
        for index in range(request["n"]):
            reason = out.finish(name, index).reason
            if reason is FinishReason.CANCELLED:
                assert name in aborted
                assert out.ids(name, index) == solo.out.ids(name, index)[: len(out.ids(name, index))]
                assert solo.out.text(name, index).startswith(out.text(name, index)[:-1])
            else:
                assert out.ids(name, index) == solo.out.ids(name, index)
                assert out.text(name, index) == solo.out.text(name, index)
                assert reason is solo.out.finish(name, index).reason


def test_soak_refuses_what_cannot_fit(make_bench: MakeBench) -> None:
    """A request too large for the pool is refused while others run, and disturbs none of them."""
    bench = make_bench(n_blocks=5)
    bench.submit("a", [1, 2], bench.plan(12))
    bench.step(3)
    with pytest.raises(PromptTooLongError):
        bench.submit("b", [1] * 30)
    assert len(bench.run().ids("a")) == 12
