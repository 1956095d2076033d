"""Comparing variants beside running streams."""

from __future__ import annotations

import pytest

from paceline_engine.errors import BackendError, InvalidValueError, PromptTooLongError, UnknownOptionError
from paceline_engine.fidelity import FidelityRequest
from paceline_engine.mode import Variant


def request(n_tokens: int = 20, **options) -> FidelityRequest:
    return FidelityRequest(
        **{"id": "c", "token_ids": tuple(range(n_tokens)), "reference": Variant.BF16, **options}
    )


@pytest.fixture
def bench(make_bench):
    return make_bench()


def outputs_of(bench) -> list:
    found = []
    while bench.engine.has_work:
        found.append(bench.engine.step())
    return found


def test_variants_are_compared_and_every_block_comes_back(bench):
    """The comparison ends with one result of all variants, the reference first, and holds nothing then."""
    bench.runner.variants_differ = True
    free = bench.free
    bench.engine.submit_fidelity(request(first_compared=5))
    (found,) = [each for output in outputs_of(bench) for each in output.fidelities]
    assert found[0] == "c"
    assert list(found[1]) == [Variant.BF16, Variant.INT4]
    assert {each.n_tokens for each in found[1].values()} == {15}
    assert found[1][Variant.BF16].kl_nats == 0 < found[1][Variant.INT4].kl_nats
    assert bench.free == free


def test_a_running_stream_is_the_same_beside_a_comparison(bench, greedy_ids):
    """Neither writes where the other reads."""
    bench.submit("s", [1, 2, 3])
    bench.engine.submit_fidelity(request())
    outputs = outputs_of(bench)
    tokens = [token for output in outputs for _, chunk in output.chunks for token in chunk.token_ids]
    assert tokens == greedy_ids([1, 2, 3], 8)
    assert sum(len(output.fidelities) for output in outputs) == 1


def test_a_comparison_waits_for_blocks(bench):
    """While a stream holds the cache it runs no pass; once the stream has ended it does."""
    bench.submit("s", range(60), bench.plan(max_tokens=4))
    bench.engine.submit_fidelity(request(n_tokens=60, first_compared=59))
    outputs = outputs_of(bench)
    assert [bool(output.fidelities) for output in outputs].index(True) == len(outputs) - 1
    assert not any(output.errors for output in outputs)


def test_an_aborted_comparison_gives_its_blocks_back(bench):
    """It says nothing more, and its blocks are free."""
    free = bench.free
    bench.engine.submit_fidelity(request(n_tokens=50, first_compared=2))
    bench.engine.step()
    assert bench.free < free
    bench.engine.abort("c")
    assert [output.fidelities for output in outputs_of(bench)] == [()]
    assert bench.free == free


def test_a_pass_that_fails_ends_the_comparison_alone(bench):
    """The error reaches whoever asked, and the blocks are free."""
    free = bench.free

    def fail(slices):
        raise RuntimeError("broken")

    bench.runner.before_pass = fail
    bench.engine.submit_fidelity(request())
    ((request_id, error),) = [each for output in outputs_of(bench) for each in output.errors]
    assert request_id == "c"
    assert isinstance(error, BackendError)
    assert "broken" in str(error)
    assert bench.free == free


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"token_ids": (1, 64)}, InvalidValueError),
        ({"reference": Variant.FP8}, UnknownOptionError),
        ({"n_tokens": 80}, PromptTooLongError),
    ],
)
def test_what_cannot_be_compared_is_refused(bench, options, error):
    """Ids beyond the vocabulary, a variant that is not loaded, and a text that no cache can hold."""
    options.setdefault("token_ids", tuple(each % 60 for each in range(options.pop("n_tokens", 2))))
    with pytest.raises(error):
        bench.engine.submit_fidelity(request(**options))
