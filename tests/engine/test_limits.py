"""What can never fit is refused with the limit that it passes."""

from __future__ import annotations

import pytest

from paceline_engine.errors import PromptTooLongError
from paceline_engine.limits import check_fits


@pytest.mark.parametrize(("n_more", "capacity"), [(412, None), (412, 511), (12, 111), (1, 100)])
def test_what_just_fits_passes(n_more: int, capacity: int | None) -> None:
    """The last token needs no place in the KV cache."""
    check_fits(n_prompt=100, n_more=n_more, more="max_tokens", context_tokens=512, capacity_tokens=capacity)


@pytest.mark.parametrize(
    ("n_more", "capacity", "words", "absent"),
    [
        (413, None, ("512", "context", "lower max_tokens"), "kv_tokens"),
        (13, 111, ("112", "KV cache", "raise kv_tokens"), "context"),
        (1, 99, ("100", "shorten the prompt"), "lower max_tokens"),
    ],
)
def test_the_limit_that_is_passed_is_named(
    n_more: int, capacity: int | None, words: tuple[str, ...], absent: str
) -> None:
    """The smaller of context and KV cache, what was seen, and only a remedy that would help."""
    with pytest.raises(PromptTooLongError) as caught:
        check_fits(
            n_prompt=100, n_more=n_more, more="max_tokens", context_tokens=512, capacity_tokens=capacity
        )
    for word in (*words, "100 tokens"):
        assert word in str(caught.value)
    assert absent not in str(caught.value)
