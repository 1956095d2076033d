"""A decision from the command line, on the real model."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.real


def test_plan_prints_the_decision(real) -> None:
    """Every mode with its prediction, and nothing is run."""
    decision = real("plan", "Where is my bag?", "--profile", "assume", "--max-tokens", "8")
    assert decision["max_tokens"] <= 8
    assert len(decision["candidates"]) >= 3
    assert sum(each["chosen"] for each in decision["candidates"]) == 1
