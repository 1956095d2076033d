"""The current turn, in a context variable: the only global state of the SDK.

A task inherits the turn that was current when it was created. A thread inherits it only when it runs in a
copied context: ``asyncio.to_thread`` copies it, ``ThreadPoolExecutor.submit`` does not, so there hand over
``contextvars.copy_context().run``.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.sync import Turn
    from paceline.turn import AsyncTurn

_current: ContextVar[AsyncTurn | Turn | None] = ContextVar("paceline_current_turn", default=None)


def current_turn() -> AsyncTurn | Turn | None:
    """The innermost turn that is open here, or None.

    It is an ``AsyncTurn`` where the turn was opened by an ``AsyncClient`` and a ``Turn`` where it was
    opened by a ``Client``. A task that outlives its turn sees the next outer turn that is still open.
    """
    turn = _current.get()
    while turn is not None and turn.closed:
        turn = turn.outer
    return turn


def enter_turn(turn: AsyncTurn | Turn) -> None:
    """Make ``turn`` the current one in this context."""
    _current.set(turn)


def leave_turn(turn: AsyncTurn | Turn) -> None:
    """Restore the outer turn, where ``turn`` is still the current one in this context.

    A token's reset would fail where a turn is closed in another context than the one that opened it
    (a fixture, a framework's clean-up hook), so the outer turn is remembered instead.
    """
    if _current.get() is turn:
        _current.set(turn.outer)
