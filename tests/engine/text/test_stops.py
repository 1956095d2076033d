from __future__ import annotations

import random

import pytest

from paceline_engine.text.stops import StopMatcher


def feed(stops: list[str], pieces: list[str]) -> tuple[str, str | None, list[str]]:
    """All text that is sent, the stop that was found, and what each piece settled."""
    matcher = StopMatcher(stops)
    sent: list[str] = []
    for piece in pieces:
        settled = matcher.push(piece)
        sent.append(settled.text)
        if settled.stop is not None:
            return "".join(sent), settled.stop, sent
    return "".join(sent) + matcher.flush(), None, sent


def test_a_stop_in_pieces_is_held_back() -> None:
    """Nothing from the stop's first letter on is sent, and what went before is not held."""
    text, stop, sent = feed(["DEFGHIJ"], ["ABC", "DEF", "G", "HI", "J"])
    assert (text, stop) == ("ABC", "DEFGHIJ")
    assert sent == ["ABC", "", "", "", ""]


def test_a_near_miss_is_sent() -> None:
    """Text that began like a stop and went on otherwise is sent at once."""
    _, stop, sent = feed(["DEFG"], ["xDE", "F", "H"])
    assert stop is None
    assert sent == ["x", "", "DEFH"]


def test_text_at_the_end_is_flushed() -> None:
    """What still waits when the output ends was no stop."""
    assert feed(["<end>"], ["a<en"])[:2] == ("a<en", None)


@pytest.mark.parametrize(
    ("stops", "text", "sent", "stop"),
    [
        (["BCD", "C"], "ABCDE", "AB", "C"),
        (["C", "BCD"], "ABXBCD", "ABXB", "C"),
        (["AAB"], "AAAB", "A", "AAB"),
        (["ab", "bc"], "xabc", "x", "ab"),
        (["aab", "b"], "aab", "", "aab"),
        (["é\n", "🎉🎉"], "né🎉é🎉🎉!", "né🎉é", "🎉🎉"),
        (["\n\n"], "a\nb\n\nc", "a\nb", "\n\n"),
    ],
)
def test_first_complete_match_wins_for_every_cut(stops: list[str], text: str, sent: str, stop: str) -> None:
    """However the text is cut, the same stop ends it at the same place."""
    assert feed(stops, [text])[:2] == (sent, stop)
    assert feed(stops, list(text))[:2] == (sent, stop)
    for at in range(len(text) + 1):
        assert feed(stops, [text[:at], text[at:]])[:2] == (sent, stop)


def test_random_cuts() -> None:
    """Streamed equals not streamed, for random texts, stops and cuts; and nothing is held without need."""
    rng = random.Random(0)
    for _ in range(500):
        text = "".join(rng.choice("ab") for _ in range(12))
        stops = [
            "".join(rng.choice("ab") for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(1, 3))
        ]
        whole = feed(stops, [text])[:2]
        cuts = sorted(rng.sample(range(13), 4))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, 12], strict=True)]
        assert feed(stops, pieces)[:2] == whole
        matcher, sent = StopMatcher(stops), ""
        for i, letter in enumerate(text):
            settled = matcher.push(letter)
            sent += settled.text
            if settled.stop is not None:
                break
            held = text[len(sent) : i + 1]
            assert not held or any(stop.startswith(held) for stop in stops)


def test_no_stops_hold_nothing() -> None:
    """Without stop strings every piece passes at once."""
    assert feed([], ["a", "", "b"]) == ("ab", None, ["a", "", "b"])
