from __future__ import annotations

import random

import pytest

from paceline_engine.speculate.history import TokenHistory, repetition


def continuation(token_ids: list[int], most: int) -> tuple[int, list[int], bool]:
    history = TokenHistory()
    history.follow(token_ids)
    return history.continuation(most)


def test_longest_match_wins_over_a_later_one() -> None:
    """What followed the longest occurrence of the latest tokens is proposed."""
    assert continuation([1, 2, 3, 7, 8, 2, 3, 9, 5, 1, 2, 3], 2) == (3, [7, 8], False)


def test_the_later_of_two_equal_matches_wins() -> None:
    """Of equally long matches the latest is continued."""
    assert continuation([1, 2, 7, 5, 1, 2, 8, 6, 1, 2], 1) == (2, [8], False)


@pytest.mark.parametrize("token_ids", [[], [1], [1, 2, 3], [1, 2, 1]])
def test_without_a_match_nothing_is_proposed(token_ids: list[int]) -> None:
    """One repeated token is no match, and neither is anything in a short or new text."""
    assert continuation(token_ids, 4) == (0, [], False)


def test_a_loop_goes_on() -> None:
    """A continuation that reaches the end of the text goes on through itself."""
    assert continuation([4, 1, 2, 3, 1, 2, 3], 8) == (3, [1, 2, 3, 1, 2, 3, 1, 2], False)
    assert continuation([5, 5, 5], 3)[1] == [5, 5, 5]


def test_earlier_texts_are_searched_and_not_run_over() -> None:
    """A match may lie in an earlier text of the session; what ends there is continued by nothing."""
    history = TokenHistory([[1, 2, 3], [7, 8, 9, 4]])
    history.follow([5, 7, 8])
    assert history.continuation(5) == (2, [9, 4], True)
    history.follow([5, 7, 8, 2, 3])
    assert history.continuation(5) == (0, [], False)


def test_the_stream_s_own_text_comes_before_earlier_ones() -> None:
    """An earlier text serves only with a longer match than the stream's own text has."""
    history = TokenHistory([[6, 7, 8, 9]])
    history.follow([7, 8, 1, 7, 8])
    assert history.continuation(1) == (2, [1], False)
    history.follow([7, 8, 1, 7, 8, 2, 6, 7, 8])
    assert history.continuation(1) == (3, [9], True)


def test_growing_step_by_step_equals_reading_at_once() -> None:
    """A history that follows a growing text finds what one that reads it at once and a plain search find."""
    rng = random.Random(4)
    ids = [rng.randrange(4) for _ in range(1500)]
    grown = TokenHistory()
    for end in (*range(1, 80), 900, 1200, 1500):
        grown.follow(ids[:end])
        found = grown.continuation(6)
        assert found == continuation(ids[:end], 6)
        assert found[0] == _longest(ids[:end])


def _longest(ids: list[int]) -> int:
    """The longest suffix, up to 32 tokens, that also stands earlier; 0 below two."""
    best = 0
    for length in range(2, min(33, len(ids))):
        suffix = ids[-length:]
        if any(ids[at : at + length] == suffix for at in range(len(ids) - length)):
            best = length
    return best


def test_repetition_is_what_a_lookup_of_two_tokens_would_draft_right() -> None:
    """A text without repeated pairs has 0, a loop nearly 1, and half a loop half."""
    assert repetition(range(1000)) == 0.0
    assert repetition([1, 2, 3, 4] * 250) == pytest.approx(1.0, abs=0.01)
    assert repetition([*range(10, 510), *[1, 2, 3, 4] * 125]) == pytest.approx(0.5, abs=0.01)
    assert repetition([1, 2, 5, 1, 2, 6, 1, 2, 7]) == 0.0, "what follows the pair differs each time"
    assert repetition([]) == repetition([1, 1, 1]) == 0.0
