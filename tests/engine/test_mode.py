from __future__ import annotations

from typing import Any

import pytest

from paceline_engine.errors import PacelineError, UnknownOptionError
from paceline_engine.mode import Drafter, Mode, Speculation, Variant


def test_names_may_be_given_as_plain_text() -> None:
    """A mode of texts is the mode of their members, and holds the members."""
    given: Any = {"drafter": "self", "draft_variant": "int4"}
    mode = Mode(variant="int8", speculation=Speculation(max_draft_tokens=4, **given))  # type: ignore[arg-type]
    assert mode.variant is Variant.INT8
    assert mode.speculation is not None
    assert mode.speculation.drafter is Drafter.SELF
    assert mode.speculation.draft_variant is Variant.INT4
    assert mode.label == "int8+int4x4"


@pytest.mark.parametrize("name", ["int2", "INT8", "", 8, None])
def test_unknown_names_are_refused(name: Any) -> None:
    """Whoever mistypes a name is told those that there are, and not by the engine's worker."""
    with pytest.raises(UnknownOptionError, match="'bf16'"):
        Mode(variant=name)
    with pytest.raises(PacelineError):
        Speculation(drafter=Drafter.SELF, max_draft_tokens=4, draft_variant=name)
    with pytest.raises(UnknownOptionError, match="'ngram'"):
        Speculation(drafter=name, max_draft_tokens=4)
