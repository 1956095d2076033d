"""Keeps a prompt's prefix cached while a tool runs, where the backend can."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING
from uuid import uuid4

from paceline_engine.backends.base import Pinning
from paceline_engine.errors import PacelineError
from paceline_engine.request import Prompt

if TYPE_CHECKING:
    from paceline.call import Call

HOLD_S = 60.0
"""A tool that takes longer has its prefix evicted like any other."""


class PrefixPin:
    """One pin, from its making to ``end``. A pin is a wish: whatever fails, the turn goes on."""

    def __init__(
        self,
        backend: Pinning,
        prompt: Prompt,
        *,
        salt: str = "",
        adapter: str | None = None,
        hold_s: float = HOLD_S,
    ) -> None:
        self.n_tokens = prompt.n_tokens
        """Of the prompt; how much of it is cached and kept, the backend's snapshots tell."""
        self._backend = backend
        self._id = uuid4().hex
        with contextlib.suppress(PacelineError):
            backend.pin(self._id, prompt, hold_s=hold_s, salt=salt, adapter=adapter)

    @classmethod
    def of(cls, call: Call) -> PrefixPin | None:
        """A pin on the prompt of a call that ran; None where its backend pins nothing."""
        backend = call.decided.served.backend
        mode = None if call.plan is None else call.plan.mode
        if mode is None or not mode.prefix_cache or not isinstance(backend, Pinning):
            return None
        options = call.wanted.options
        return cls(backend, call.decided.prompt, salt=options.salt, adapter=options.adapter)

    def end(self) -> None:
        """Let the prefix be evicted again."""
        with contextlib.suppress(PacelineError):
            self._backend.unpin(self._id)
