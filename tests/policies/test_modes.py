from __future__ import annotations

from paceline_engine.backends.base import ModelInfo
from paceline_engine.mode import Drafter, Speculation, Variant
from paceline_policies.modes import candidate_modes


def test_one_mode_for_each_variant_in_order(info: ModelInfo) -> None:
    """Without speculation the modes are the model's variants, best quality first."""
    modes = candidate_modes(info, batch_cap=3, prefix_cache=False)
    assert tuple(each.variant for each in modes) == info.variants
    assert {(each.batch_cap, each.prefix_cache, each.speculation) for each in modes} == {(3, False, None)}


def test_no_variant_drafts_for_itself(info: ModelInfo) -> None:
    """Each variant is offered with each drafter but itself."""
    ngram = Speculation(drafter=Drafter.NGRAM, max_draft_tokens=4)
    int4 = Speculation(drafter=Drafter.SELF, max_draft_tokens=3, draft_variant=Variant.INT4)
    labels = [each.label for each in candidate_modes(info, speculations=(ngram, int4))]
    assert labels == [
        "bf16",
        "bf16+ngramx4",
        "bf16+int4x3",
        "int8",
        "int8+ngramx4",
        "int8+int4x3",
        "int4",
        "int4+ngramx4",
    ]
