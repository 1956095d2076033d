"""The step policy: what each step of an engine runs, beside its step loop.

``numbers`` what a policy is made from, as plain data that crosses to the worker · ``speeds`` what a pass
costs now · ``pacer`` the order and size of prefill · ``governor`` the variant of each running stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from paceline_policies.pacing.numbers import StepNumbers
    from paceline_policies.pacing.pacer import Pacer

__all__ = ["STEP_POLICY", "Pacer", "StepNumbers", "make_step_policy"]

STEP_POLICY: Final = "paceline_policies.pacing:make_step_policy"
"""What a backend's configuration names, so that its worker imports it."""


def make_step_policy(numbers: Mapping[str, Any]) -> Pacer:
    """The policy that follows from what ``StepNumbers.to_dict`` gave; without numbers it only orders.

    Raises:
        InvalidValueError: numbers of another form.
    """
    from paceline_policies.pacing.numbers import StepNumbers
    from paceline_policies.pacing.pacer import Pacer

    return Pacer(StepNumbers.from_dict(numbers))


def __getattr__(name: str) -> Any:
    """Import the rest when it is asked for: naming the policy needs none of it."""
    if name == "Pacer":
        from paceline_policies.pacing.pacer import Pacer

        return Pacer
    if name == "StepNumbers":
        from paceline_policies.pacing.numbers import StepNumbers

        return StepNumbers
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
