"""Hands the step policy its numbers: when a profile is known, and again when they have moved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paceline_engine.backends.base import Backend
from paceline_engine.errors import PacelineError
from paceline_policies.pacing import STEP_POLICY, StepNumbers
from paceline_policies.profile import Profile

MOVED = 0.05
"""Relative change of a typical pass's cost from which the policy gets new numbers."""


class StepPolicyLink:
    """One backend's step policy, as its client sees it."""

    def __init__(self, renew: Callable[[Mapping[str, Any]], object]) -> None:
        self._renew = renew
        self._last: StepNumbers | None = None

    @classmethod
    def of(cls, backend: Backend) -> StepPolicyLink | None:
        """None where the backend steps by itself, or by a policy of the caller's."""
        renew = getattr(backend, "renew_step_policy", None)
        named = getattr(getattr(backend, "config", None), "step_policy", None)
        return cls(renew) if callable(renew) and named == STEP_POLICY else None

    def renew(self, profile: Profile) -> None:
        """Send the profile's numbers where they differ from those that the policy has. Never blocks."""
        numbers = StepNumbers.of_profile(profile)
        if self._last is not None and numbers.moved_from(self._last) < MOVED:
            return
        try:
            self._renew(numbers.to_dict())
        except PacelineError:
            # A worker that died or belongs to another process: the next decision tells the caller.
            return
        self._last = numbers
