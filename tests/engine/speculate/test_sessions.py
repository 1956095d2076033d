"""What is kept of sessions: bounded, apart from each other, and forgotten in time."""

from __future__ import annotations

from dataclasses import dataclass

from paceline_engine.speculate.sessions import SessionKey, SessionTexts


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


A, B = SessionKey(session="a"), SessionKey(session="b")


def held(texts: SessionTexts, key: SessionKey) -> list[list[int]]:
    return [part.tolist() for part in texts.earlier(key)]


def test_only_what_is_new_is_kept() -> None:
    """A conversation that grows adds its new end; one that begins otherwise adds what differs."""
    texts = SessionTexts(Clock())
    texts.add(A, [1, 2, 3, 10])
    texts.add(A, [1, 2, 3, 10, 4, 11])
    texts.add(A, [1, 2, 9, 9])
    assert held(texts, A) == [[1, 2, 3, 10], [4, 11], [9, 9]]


def test_sessions_and_salts_are_apart() -> None:
    """The same name with another salt is another session, and unknown ones have nothing."""
    texts = SessionTexts(Clock())
    texts.add(A, [1, 2])
    assert held(texts, SessionKey(session="a", salt="other")) == []
    assert held(texts, B) == []
    texts.end(B)
    texts.end(A)
    assert held(texts, A) == []
    assert (len(texts), texts.n_tokens) == (0, 0)


def test_memory_is_bounded() -> None:
    """Of one session the latest tokens stay, of all sessions those used last."""
    texts = SessionTexts(Clock(), most_tokens=5, most_sessions=2)
    texts.add(A, [1, 2, 3])
    texts.add(A, [4, 5, 6, 7])
    assert held(texts, A) == [[3], [4, 5, 6, 7]]
    texts.add(A, list(range(100)))
    assert held(texts, A) == [[95, 96, 97, 98, 99]]
    for number in range(10):
        texts.add(SessionKey(session=str(number)), [1, 2, 3, 4, 5, 6, 7])
    assert len(texts) == 2
    assert texts.n_tokens <= 2 * 2 * 5
    assert held(texts, SessionKey(session="9")) == [[3, 4, 5, 6, 7]]


def test_an_idle_session_is_forgotten() -> None:
    """One that was used meanwhile stays."""
    clock = Clock()
    texts = SessionTexts(clock, idle_s=10)
    texts.add(A, [1])
    texts.add(B, [2])
    clock.now_s = 6
    texts.add(A, [1, 3])
    clock.now_s = 12
    assert held(texts, B) == []
    assert held(texts, A) == [[1], [3]]
    clock.now_s = 17
    assert held(texts, A) == []
    assert len(texts) == 0
