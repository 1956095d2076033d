"""What was said in each session, for drafting what is said again, in a bounded memory.

A session is named by its caller and belongs to one salt: no other session, and nobody of another salt, is
ever drafted its words. It ends when its caller says so, when it has rested for long, or when others need its
place.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
_NOTHING: Ids = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionKey:
    """Names a session among those of all tenants."""

    session: str
    salt: str = ""


@dataclass(slots=True)
class _Texts:
    parts: list[Ids] = field(default_factory=list[Ids])
    """What each generation added, oldest first."""
    latest: Ids = field(default_factory=lambda: _NOTHING)
    """How the latest generation's prompt and output begin: what the next one repeats of that is not new."""
    used_at_s: float = 0.0


class SessionTexts:
    """The latest texts of the sessions used last. Safe for threads.

    Args:
        most_tokens: kept of one session, and compared with its latest text.
        most_sessions: kept in all.
        idle_s: after which a session that nobody used is forgotten.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        most_tokens: int = 8192,
        most_sessions: int = 64,
        idle_s: float = 1800.0,
    ) -> None:
        self._clock = clock
        self._most_tokens = most_tokens
        self._most_sessions = most_sessions
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._sessions: OrderedDict[SessionKey, _Texts] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def n_tokens(self) -> int:
        """Tokens held for all sessions, those of the latest texts among them."""
        with self._lock:
            return sum(sum(map(len, each.parts)) + len(each.latest) for each in self._sessions.values())

    def earlier(self, key: SessionKey) -> tuple[Ids, ...]:
        """The session's texts, oldest first; none where it is not known."""
        with self._lock:
            self._drop_idle()
            found = self._sessions.get(key)
            return () if found is None else tuple(found.parts)

    def add(self, key: SessionKey, token_ids: Sequence[int]) -> None:
        """Take in a generation's prompt and output, without what its prompt repeats of the latest one's."""
        with self._lock:
            self._drop_idle()
            texts = self._sessions.setdefault(key, _Texts())
            self._sessions.move_to_end(key)
            texts.used_at_s = self._clock()
            ids = np.array(token_ids, dtype=np.int32)
            n = min(len(ids), len(texts.latest))
            differ = np.flatnonzero(ids[:n] != texts.latest[:n])
            new = ids[int(differ[0]) if len(differ) else n :][-self._most_tokens :]
            texts.latest = ids[: self._most_tokens].copy()
            texts.parts.append(new.copy())
            excess = sum(map(len, texts.parts)) - self._most_tokens
            while excess > 0:
                oldest = texts.parts[0]
                texts.parts[0] = oldest[excess:].copy()
                excess -= len(oldest)
                if not len(texts.parts[0]):
                    del texts.parts[0]
            while len(self._sessions) > self._most_sessions:
                self._sessions.popitem(last=False)

    def end(self, key: SessionKey) -> None:
        """Forget a session; one that is not known is ignored."""
        with self._lock:
            self._sessions.pop(key, None)

    def _drop_idle(self) -> None:
        before_s = self._clock() - self._idle_s
        while self._sessions and next(iter(self._sessions.values())).used_at_s < before_s:
            self._sessions.popitem(last=False)
